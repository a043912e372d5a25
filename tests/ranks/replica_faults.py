"""What happens to two pipelines of two ranks when one rank of one of them fails, or does something else?

    steps: fine, broken on (replica, place), fine  -->  on every rank: what was raised, and what the steps left
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from replica_training import Weighted, batch, mean_loss, mesh_of, mixed, plain, travelling_alone
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from pipeline import Pipe
from pipeline.distributed.data_parallel import gradient_means as replica_means

Told = tuple[str, str, list[str], float]  # type, words, notes, seconds


def told(function: Callable[[], Any]) -> Told:
    """What a call raises; "" if nothing."""
    begun = time.monotonic()
    try:
        function()
    except Exception as error:
        words = type(error).__name__, str(error), list(getattr(error, "__notes__", []))
        return (*words, time.monotonic() - begun)
    return "", "", [], time.monotonic() - begun


class Breaking(nn.Module):
    """Raises in its forward or in its backward while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ValueError("this forward breaks")
        output = self.layer(x).tanh()
        if self.when == "backward" and output.requires_grad:
            output.register_hook(self._break)
        return output

    def _break(self, grad: Tensor) -> None:
        raise ZeroDivisionError("this backward breaks")


def breaking_pipe(in_process: bool = False, **settings: Any) -> tuple[Pipe, int, int]:
    """A Pipe, and where this rank is: which replica, which place in its pipeline."""
    mesh = mesh_of(dist.get_world_size() if in_process else 2)
    torch.manual_seed(5)
    model = nn.Sequential(*[Breaking() for _ in range(4)]).double()
    where = {"devices": ["cpu"] * 4} if in_process else {"group": mesh["pp"]}
    pipe = Pipe(model, [1, 1, 1, 1], 3, replicas=mesh["dp"], heartbeat=3.0, timeout=20.0, **where, **settings)
    return pipe, mesh["dp"].get_local_rank(), 0 if in_process else mesh["pp"].get_local_rank()


def called(
    pipe: Pipe, optimizer: torch.optim.Optimizer, entry: str, x: Tensor, y: Tensor, loss_fn: Any = mean_loss
) -> None:
    if entry == "step":
        pipe.step(x, y, loss_fn=loss_fn, optimizer=optimizer)
    else:
        loss_fn(pipe(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def broken_once(cases: list[tuple[int, int, str, str]], in_process: bool = False) -> list[tuple[Told, bool]]:
    """For each (replica, place, when, entry): what this rank is told, and whether it trains on as if nothing had been.

    The Pipe goes from failure to failure; another Pipe has none.
    """
    pipe, replica, place = breaking_pipe(in_process)
    healthy, _, _ = breaking_pipe(in_process)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (pipe, healthy)]
    results = []
    for step, (where, at, when, entry) in enumerate(cases):
        x, y = batch(replica, step, 6)
        is_here = (where, at) == (replica, place)
        layers = [layer for layer in pipe if isinstance(layer, Breaking)]
        layers[-1].when = when if is_here else ""
        loss_fn = broken_loss if is_here and when == "loss" else mean_loss
        faulty = breaking(when) if is_here and when in ("_mean", "_joined") else nullcontext()
        weight = layers[-1].layer.weight
        hook = weight.register_hook(refusing) if is_here and when == "hook" else None  # the others have none
        with travelling_alone(step % 2 == 0), faulty:
            error = told(lambda: called(pipe, optimizers[0], entry, x, y, loss_fn))
        grads = [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]
        layers[-1].when = ""
        if hook is not None:
            hook.remove()
        called(pipe, optimizers[0], entry, x, y)
        called(healthy, optimizers[1], entry, x, y)
        same = all(map(torch.equal, pipe.parameters(), healthy.parameters()))
        results.append((error, same and not grads))
    return results


def refusing(grad: Tensor) -> None:
    raise ArithmeticError("this hook breaks")


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    raise KeyError("no such loss")


broken_loss.__name__ = mean_loss.__name__  # which ranks compare


@contextmanager
def breaking(name: str) -> Iterator[None]:
    """Within: this rank fails as it computes its share of the means, or puts the shares together."""
    kept = getattr(replica_means, name)

    def fails(*args: Any) -> Any:
        raise MemoryError("no room for a mean")

    setattr(replica_means, name, fails)
    try:
        yield
    finally:
        setattr(replica_means, name, kept)


def lost_once(replica: int, place: int, how: int) -> tuple[Told, Told]:
    """A rank is killed or stopped in the second step; what the others are told then, and in a third.

    All have left the first one by then: what that rank sent last in it may otherwise never be sent.
    """
    pipe, mine, here = breaking_pipe()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02)
    x, y = batch(mine, 0, 6)
    called(pipe, optimizer, "step", x, y)
    store, key = _get_default_store(), f"lost_once/{replica}/{place}"
    store.add(key, 1)
    while store.add(key, 0) < dist.get_world_size():
        time.sleep(0.01)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output, target)

    if (mine, here) == (replica, place):
        next(layer for layer in pipe if isinstance(layer, Breaking)).register_forward_hook(
            lambda *_: os.kill(os.getpid(), how)
        )
    first = told(lambda: called(pipe, optimizer, "step", x, y, loss_fn))
    return first, told(lambda: called(pipe, optimizer, "step", x, y))


def mismatches() -> list[tuple[str, Told, bool]]:
    """What replicas are told that do not do the same, and whether the next step works and leaves them equal."""
    torch.manual_seed(0)
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    found = []

    def tell(what: str, function: Callable[[], Any], after: Callable[[], Any]) -> None:
        error = told(function)
        after()
        pipe.step(x, y, loss_fn=mean_loss, optimizer=optimizer)
        mine = torch.cat([parameter.detach().flatten() for parameter in pipe.parameters()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine, mesh["dp"].get_group())
        found.append((what, error, torch.equal(*both)))

    pipe = Pipe(plain(), [2, 3], 3, group=mesh["pp"], replicas=mesh["dp"])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02)
    x, y = batch(replica, 0, 6)
    one = replica == 1

    def again() -> None:
        pass

    def set_chunks(chunks: int) -> None:
        pipe.chunks = chunks

    def freeze(trained: bool) -> None:
        list(pipe.parameters())[0].requires_grad_(trained or not one)

    def another(model: nn.Sequential, balance: list[int]) -> Pipe:
        return Pipe(model, balance, 3, group=mesh["pp"], replicas=mesh["dp"])

    tell("balance", lambda: another(plain(), [3, 2] if one else [2, 3]), again)
    tell("model", lambda: another(plain(), [2, 3]) if one else another(mixed(), [2, 6]), again)
    set_chunks(4 if one else 3)
    tell("chunks", lambda: pipe.step(x, y, loss_fn=mean_loss), lambda: set_chunks(3))
    clip = 1.0 if one else None
    tell("options", lambda: pipe.step(x, y, loss_fn=mean_loss, grads="store", clip_grad_norm=clip), again)
    if one:
        pipe.eval()
    tell("modes", lambda: pipe.step(x, y, loss_fn=mean_loss), pipe.train)
    tell("entry", lambda: mean_loss(pipe(x), y).backward() if one else pipe.step(x, y, loss_fn=mean_loss), again)
    if one:
        pipe(x)
    tell("number", lambda: pipe.step(x, y, loss_fn=mean_loss), again)
    if one:
        pipe.load_state_dict(pipe.state_dict())
        pipe.evaluate(x, y, loss_fn=mean_loss)  # alone, as a replica may
    tell("loaded", lambda: pipe.step(x, y, loss_fn=mean_loss), again)
    freeze(False)
    tell("frozen", lambda: pipe.step(x, y, loss_fn=mean_loss), lambda: freeze(True))
    return found


def other_losses() -> list[Told]:
    """One replica's loss has a parameter, the other's has none; then both have."""
    mesh = mesh_of(dist.get_world_size())
    pipe = Pipe(plain(), [2, 3], 3, devices=["cpu"] * 2, replicas=mesh["dp"])
    x, y = batch(mesh["dp"].get_local_rank(), 0, 6)
    loss = Weighted()
    one = mesh["dp"].get_local_rank() == 1
    first = told(lambda: pipe.step(x, y, loss_fn=loss if one else Weighted(learns=False)))
    return [first, told(lambda: pipe.step(x, y, loss_fn=loss))]


def other_gradients() -> tuple[Told, bool, bool]:
    """One rank of one pipeline scales its loss; whether there is a gradient then, and after a right call."""
    pipe, replica, place = breaking_pipe()
    x, y = batch(replica, 0, 6)
    scale = 1 + ((replica, place) == (1, 0))
    error = told(lambda: (mean_loss(pipe(x), y) * scale).backward())
    before = any(parameter.grad is not None for parameter in pipe.parameters())
    mean_loss(pipe(x), y).backward()
    return error, before, all(parameter.grad is not None for parameter in pipe.parameters())


def late() -> tuple[list[Told], bool]:
    """A step that fails; one that rank 0 comes to when the others have given it up; and one that goes well."""
    mesh = mesh_of()
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    pipe = Pipe(model, [2, 2], 3, group=mesh["pp"], replicas=mesh["dp"], timeout=2.5)
    x, y = batch(mesh["dp"].get_local_rank(), 0, 6)
    store, others = _get_default_store(), dist.get_world_size() - 1
    found = [told(lambda: pipe.step(x, y, loss_fn=broken_loss))]
    if dist.get_rank() == 0:
        store.wait([f"given up by {rank + 1}" for rank in range(others)], timedelta(seconds=40))
    found.append(told(lambda: pipe.step(x, y, loss_fn=mean_loss)))
    store.set(f"given up by {dist.get_rank()}", "")
    found.append(told(lambda: pipe.step(x, y, loss_fn=mean_loss)))
    return found, all(parameter.grad is not None for parameter in pipe.parameters())


class Refusing(torch.optim.SGD):
    """Fails where it is told to: when everyone has agreed."""

    is_broken = False

    def step(self, closure: Any = None) -> Any:
        if self.is_broken:
            raise OverflowError("this optimizer breaks")
        return super().step(closure)


def torn() -> tuple[Told, Told]:
    """What a step and the next one tell, if the first one's optimizer failed on rank 0."""
    pipe, replica, place = breaking_pipe()
    x, y = batch(replica, 0, 6)
    optimizer = Refusing(pipe.parameters(), lr=0.1)
    optimizer.is_broken = (replica, place) == (0, 0)
    first = told(lambda: called(pipe, optimizer, "step", x, y))
    optimizer.is_broken = False
    return first, told(lambda: called(pipe, optimizer, "step", x, y))


def backward_again() -> tuple[Told, list[bool]]:
    """A backward that fails part-way on one rank, and then goes well; against one that goes well at once."""
    pipe, replica, place = breaking_pipe()
    x, y = batch(replica, 0, 6)
    layers = [layer for layer in pipe if isinstance(layer, Breaking)]
    broken = []

    def breaks_once(grad: Tensor) -> None:
        if not broken and (replica, place) == (1, 0):
            broken.append(True)
            raise ZeroDivisionError("this backward breaks")

    with travelling_alone(True):
        hook = layers[0].register_forward_hook(lambda _, __, output: output.register_hook(breaks_once) and None)
        loss = mean_loss(pipe(x), y)
        error = told(lambda: loss.backward(retain_graph=True))
        hook.remove()
        loss.backward()
        found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        pipe.zero_grad()
        mean_loss(pipe(x), y).backward()
    return error, [torch.equal(parameter.grad, one) for parameter, one in zip(pipe.parameters(), found, strict=True)]


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.2)
        return x


def slow(in_process: bool) -> Told:
    """A step of 0.2 s an action and 1.4 s or more in all, with a timeout of 1 s."""
    torch.manual_seed(0)
    mesh = mesh_of(dist.get_world_size() if in_process else 2)
    where = {"devices": ["cpu"] * 2} if in_process else {"group": mesh["pp"]}
    model = nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 4), Slow()).double()
    pipe = Pipe(model, [2, 2], 6, checkpoint="never", replicas=mesh["dp"], timeout=1.0, **where)
    x, y = batch(mesh["dp"].get_local_rank(), 0, 6)
    return told(lambda: pipe.step(x, y, loss_fn=mean_loss))
