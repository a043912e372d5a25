"""Does an EagerUpdate over ranks do what the optimizer itself does? Scripts that train both ways.

    script(make, ...)  trains over ranks with EagerUpdate(optimizer), in one process with the optimizer itself; returns
                       what it found, for one_and_many.py to compare. In `make soak` both places train both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cover import is_whole
from one_and_many import Found, Make, differences, in_one_process, over_ranks
from rank_entry_points import OPTIMIZERS
from rank_models import even, layered, rows, square
from replica_faults import Refusing, Told, told
from replica_training import (
    SEED,
    Multiply,
    batch,
    counted_loss,
    mean_loss,
    mesh_of,
    mixed,
    plain,
    tied,
    travelling_alone,
)
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from pipeline import EagerUpdate, Pipe, eager_backward

Build = Callable[[], Pipe]
Train = Callable[[Pipe, torch.optim.Optimizer, EagerUpdate | None], Found]
LOSSES: dict[str, Any] = {"mean": mean_loss, "counted": counted_loss, "module": nn.MSELoss()}
CHECKPOINTS: dict[str, Any] = {
    "never": "never",
    "always": "always",
    "mixed": lambda stage, chunk: (stage + chunk) % 2 == 0,
}


def ways_of(make: Make) -> tuple[bool, ...]:
    """Over ranks an EagerUpdate, in one process the optimizer itself; in `make soak` both ways in both places."""
    return (True, False) if is_whole() else (make is over_ranks,)


def both_ways(build: Build, optimizer: str, train: Train, ways: Sequence[bool] = (True, False), **how: Any) -> Found:
    """What a training leaves, if it leaves the same in these ways.

    Args:
        build: makes the Pipe anew.
        optimizer: a key of OPTIMIZERS.
        train: gets (pipe, optimizer, update); without an update it trains with the optimizer.
        ways: each with an EagerUpdate, or without.
        how: of the EagerUpdate.
    """
    found: list[Found] = []
    for is_eager in ways:
        pipe = build()
        stepper = OPTIMIZERS[optimizer](pipe.parameters())
        update = EagerUpdate(stepper, **how) if is_eager else None
        found.append({**train(pipe, stepper, update), **state_of(pipe, "end"), **memory_of(pipe, stepper)})
    wrong = differences(found[0], found[-1]) + differences(found[-1], found[0])
    if wrong:
        raise AssertionError(f"unlike the ordinary step: {wrong[:3]}")
    return found[0]


def state_of(pipe: Pipe, when: object = "") -> Found:
    """What this process has, under all of its names: parameters, gradients, buffers."""
    found: Found = {}
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        found[f"{when} {name}"] = _copied(parameter)
        found[f"{when} {name}.grad"] = None if parameter.grad is None else _copied(parameter.grad)
    return found | {f"{when} {name}": _copied(buffer) for name, buffer in pipe.named_buffers()}


def memory_of(pipe: Pipe, optimizer: torch.optim.Optimizer) -> Found:
    """The optimizer's state of each parameter that this process has."""
    named = [*pipe.named_parameters(remove_duplicate=False)]
    return {
        f"state of {name}": {key: _copied(value) for key, value in optimizer.state[each].items()}
        for name, each in named if each in optimizer.state
    }  # fmt: skip


def _copied(value: Any) -> Any:
    """A value that equals another where both are not a number."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value.clone() if isinstance(value, Tensor) else value
    return value.detach().nan_to_num(nan=7e33, posinf=torch.inf, neginf=-torch.inf)


def steps(losses: Sequence[str], clip: float | None = None, count: int = 3, size: int = 9) -> Train:
    """A training of some steps by `pipe.step`, with these losses in turn."""

    def train(pipe: Pipe, optimizer: torch.optim.Optimizer, update: EagerUpdate | None) -> Found:
        found: Found = {}
        for step in range(count):
            how: dict[str, Any] = {"optimizer": update}
            if update is None:
                how = {"optimizer": optimizer, "clip_grad_norm": clip}
            x, y = rows(size + step, seed=step), rows(size + step, seed=40 + step)
            result = pipe.step(x, y, loss_fn=LOSSES[losses[step % len(losses)]], outputs=step == 1, **how)
            found |= {f"{step} loss": result.loss, f"{step} outputs": result.outputs, **state_of(pipe, step)}
        return found

    return train


def after_a_backward(make: Make) -> Found:
    """An eager step after a backward whose gradients the script has dropped by its model; a rank has no parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    nn.init.constant_(model[0].weight, 0.1)
    nn.init.zeros_(model[0].bias)
    pipe = make(model, [1, 1], 2)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    square(pipe(rows(6)), rows(6, seed=2)).backward()
    model.zero_grad()
    step = pipe.step(rows(6), rows(6, seed=2), loss_fn=square, optimizer=EagerUpdate(optimizer))
    return {"loss": step.loss, **state_of(pipe)}


# -------------------------------------------------------------------------------------------------- what is trained


def stepped(
    make: Make, stages: int, schedule: str, checkpoint: str, optimizer: str, losses: Sequence[str], deferred: bool
) -> Found:
    """Linear layers, BatchNorm, dropout."""
    settings = {"schedule": schedule, "checkpoint": CHECKPOINTS[checkpoint], "deferred_batch_norm": deferred}
    chunks = 6 if stages % 3 == 0 else 4
    build = lambda: make(layered(8), even(8, stages), chunks, **settings)  # noqa: E731
    return both_ways(build, optimizer, steps(losses, size=13), ways_of(make))


def clipped(make: Make, model: str, stages: int, clip: str, norm: float, optimizer: str, loss: str) -> Found:
    """Against `clip_grad_norm`."""
    train = steps([loss], norm, count=1 if model == "not a number" else 3)
    return both_ways(_built(make, model, stages), optimizer, train, ways_of(make), clip=clip, max_norm=norm)


def of_model(make: Make, model: str, stages: int, schedule: str, optimizer: str, loss: str) -> Found:
    return both_ways(_built(make, model, stages, schedule=schedule), optimizer, steps([loss]), ways_of(make))


def _built(make: Make, name: str, stages: int, **settings: Any) -> Build:
    def build() -> Pipe:
        torch.manual_seed(3)
        model = MODELS[name](stages)
        return make(model, even(len(model), stages), 3, **settings)

    return build


def _shared(*where: int) -> Callable[[int], nn.Sequential]:
    """One weight in some layers; -1 is the last one."""

    def build(stages: int) -> nn.Sequential:
        weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        layers: list[nn.Module] = [nn.Linear(4, 4).double() for _ in range(max(4, stages))]
        for index in where:
            layers[index] = Multiply(weight)
        return nn.Sequential(*layers)

    return build


def _bare(which: int) -> Callable[[int], nn.Sequential]:
    """A stage without parameters."""

    def build(stages: int) -> nn.Sequential:
        return nn.Sequential(*[nn.Tanh() if each == which % stages else nn.Linear(4, 4) for each in range(stages)])

    return lambda stages: build(stages).double()


def _frozen(stages: int) -> nn.Sequential:
    """The first layer's parameters are frozen, and one of the last layer's."""
    model = layered(8)
    model[0].requires_grad_(False)
    model[7].bias.requires_grad_(False)
    if stages == 4:
        model[1].requires_grad_(False)  # a rank with parameters, of which none is trained
    return model


def _not_a_number(stages: int) -> nn.Sequential:
    """Gradients whose norm is not a number, though the first layer's own are numbers."""
    model = layered(8)
    model[7].bias.register_hook(lambda grad: grad * torch.nan)
    return model


MODELS: dict[str, Callable[[int], nn.Sequential]] = {
    "layered": lambda stages: layered(8),
    "ends": _shared(0, -1),
    "middle": _shared(1, 2),
    "many": _shared(0, 1, -1),
    "first bare": _bare(0),
    "last bare": _bare(-1),
    "frozen": _frozen,
    "not a number": _not_a_number,
}


def ruled(make: Make, stages: int, loss: str) -> Found:
    """A rule, against the same rule on the gradients of a step without an optimizer."""

    def rule(param: Tensor, grad: Tensor) -> None:
        param.sub_(grad.sign(), alpha=0.01).mul_(0.99)

    found: list[Found] = []
    for is_eager in ways_of(make):
        pipe = make(layered(8), even(8, stages), 3)
        here: Found = {}
        for step in range(3):
            how = {"optimizer": EagerUpdate(rule)} if is_eager else {}
            here[f"{step} loss"] = pipe.step(rows(7, seed=step), rows(7), loss_fn=LOSSES[loss], **how).loss
            if not is_eager:
                _apply(rule, pipe)
            here |= state_of(pipe, step)
        found.append(here)
    wrong = differences(found[0], found[-1]) + differences(found[-1], found[0])
    assert not wrong, wrong[:3]
    return found[0]


def _apply(rule: Callable[[Tensor, Tensor], None], pipe: Pipe) -> None:
    with torch.no_grad():
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                rule(parameter, parameter.grad)
                parameter.grad = None


def backward(make: Make, model: str, stages: int, optimizer: str, parts: int) -> Found:
    """eager_backward of a loss of the forward entry point, against loss.backward() and the optimizer's step."""

    def train(pipe: Pipe, stepper: torch.optim.Optimizer, update: EagerUpdate | None) -> Found:
        found: Found = {}
        for step in range(3):
            losses = [square(pipe(rows(7 + part, seed=step + part)), rows(7 + part)) for part in range(parts)]
            loss = torch.stack(losses).prod()
            if update is None:
                loss.backward()
                stepper.step()
                stepper.zero_grad()
            else:
                eager_backward(loss, update)
            found |= {f"{step} loss": loss.detach(), **state_of(pipe, step)}
        return found

    return both_ways(_built(make, model, stages), optimizer, train, ways_of(make))


# --------------------------------------------------------------------------------------------------------- replicas


def replicated(cases: list[dict[str, Any]]) -> list[str]:
    """Two pipelines of half of the ranks each: for each case what differs from the ordinary step with replicas."""
    mesh = mesh_of()
    return ["; ".join(_of_replicas(mesh, **case)[:3]) for case in cases]


def _of_replicas(
    mesh: Any, model: str, balance: list[int], loss: str, optimizer: str, alone: bool, clip: str | None, norm: float
) -> list[str]:
    replica = mesh["dp"].get_local_rank()
    count = 7 if loss == "mean" else 6 + 4 * replica

    def build() -> Pipe:
        torch.manual_seed(1 + replica)
        pipe = Pipe(REPLICATED[model](), balance, 3, group=mesh["pp"], replicas=mesh["dp"])
        torch.manual_seed(SEED + dist.get_rank())
        return pipe

    def train(pipe: Pipe, stepper: torch.optim.Optimizer, update: EagerUpdate | None) -> Found:
        found: Found = {}
        for step in range(2):
            how: dict[str, Any] = {"optimizer": update}
            if update is None:
                how = {"optimizer": stepper, "clip_grad_norm": None if clip is None else norm}
            x, y = batch(replica, step, count + step)
            found |= {f"{step} loss": pipe.step(x, y, loss_fn=LOSSES[loss], **how).loss, **state_of(pipe, step)}
        return found

    how = {} if clip is None else {"clip": clip, "max_norm": norm}
    try:
        with travelling_alone(alone):
            both_ways(build, optimizer, train, **how)
    except AssertionError as error:
        return [str(error)]
    return []


REPLICATED: dict[str, Callable[[], nn.Sequential]] = {"mixed": mixed, "plain": plain, "tied": tied}


# --------------------------------------------------------------------------------------------------------- failures


class Faulty(nn.Module):
    """A linear layer whose backward raises the `countdown`-th time, when `behind` has made its update, if it is a rank.

    Attributes:
        countdown: 0: it does not.
        behind: a rank whose optimizer is a Telling.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.countdown, self.behind = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        output = torch.tanh(self.layer(x))
        if self.countdown and output.requires_grad:
            output.register_hook(self._counted)
        return output

    def _counted(self, grad: Tensor) -> None:
        self.countdown -= 1
        if not self.countdown:
            if self.behind >= 0:
                _get_default_store().wait([f"updates of {self.behind}"], timedelta(seconds=10))
            raise ZeroDivisionError("this backward breaks")


class Telling(torch.optim.SGD):
    """Tells other ranks when the two parameters of its rank's layer are updated."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.updates += 1
        if self.updates == 2:
            _get_default_store().set(f"updates of {dist.get_rank()}", "made")
        return found


def faulty() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*[Faulty() for _ in range(dist.get_world_size())]).double()


def torn(place: int, countdown: int, behind: int) -> dict[str, Any]:
    """A step whose backward fails on one rank; what each is told then, in the next call, and after it is acknowledged.

    Args:
        place: that rank.
        countdown, behind: of its layer.

    Returns:
        first, second, third: what the calls raised.
        torn: whether the update was torn after each of these.
        moved: whether this rank's parameters were changed by the first.
        right: whether the third step gave the parameters of one process, from the same beginning.
    """
    size = dist.get_world_size()
    pipe = over_ranks(faulty(), [1] * size, 3, checkpoint="never", timeout=20.0)
    update = EagerUpdate(Telling(pipe.parameters(), lr=0.1), separable=True)
    (layer,) = [layer for layer in pipe if isinstance(layer, Faulty)]
    before = [parameter.detach().clone() for parameter in pipe.parameters()]

    def step() -> Told:
        return told(lambda: pipe.step(rows(6), rows(6), loss_fn=square, optimizer=update))

    if dist.get_rank() == place:
        layer.countdown, layer.behind = countdown, behind
    calls, flags = [step()], [update.is_torn]
    moved = not all(map(torch.equal, before, pipe.parameters()))
    layer.countdown = 0
    calls.append(step())
    flags.append(update.is_torn)
    update.acknowledge_torn_step()
    with torch.no_grad():
        for parameter, value in zip(pipe.parameters(), before, strict=True):
            parameter.copy_(value)
    calls.append(step())
    flags.append(update.is_torn)
    right = not differences(state_of(pipe), state_of(_once()))
    first, second, third = calls
    return {"first": first, "second": second, "third": third, "torn": flags, "moved": moved, "right": right}


def _once() -> Pipe:
    """One ordinary step in one process."""
    pipe = in_one_process(faulty(), [1] * dist.get_world_size(), 3, checkpoint="never")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(rows(6), rows(6), loss_fn=square, optimizer=optimizer)
    return pipe


def refusing(place: int) -> tuple[Told, bool, Told, bool]:
    """An optimizer that raises on one rank: what all are told then, and after it is acknowledged; each: is it torn?"""
    pipe = over_ranks(faulty(), [1] * dist.get_world_size(), 3, timeout=20.0)
    optimizer = Refusing(pipe.parameters(), lr=0.1)
    update = EagerUpdate(optimizer, separable=True)
    optimizer.is_broken = dist.get_rank() == place

    def step() -> Told:
        return told(lambda: pipe.step(rows(6), rows(6), loss_fn=square, optimizer=update))

    first, was_torn = step(), update.is_torn
    optimizer.is_broken = False
    update.acknowledge_torn_step()
    return first, was_torn, step(), update.is_torn


def mismatch(apart: int, clip: str | None) -> tuple[Told, bool, bool, bool]:
    """One rank has the optimizer itself, or clips in another way than the others, who do not.

    Returns:
        What it is told; whether the update is torn; whether a parameter moved; whether the next step, with an update
        on all ranks, gives the parameters of one process.
    """
    pipe = over_ranks(faulty(), [1] * dist.get_world_size(), 3, checkpoint="never", timeout=20.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    update = EagerUpdate(optimizer)
    other = optimizer if clip is None else EagerUpdate(optimizer, clip, max_norm=1.0)
    given = other if dist.get_rank() == apart else update
    before = state_of(pipe)
    error = told(lambda: pipe.step(rows(6), rows(6), loss_fn=square, optimizer=given))
    is_torn, moved = update.is_torn, bool(differences(state_of(pipe), before))
    pipe.step(rows(6), rows(6), loss_fn=square, optimizer=update)
    return error, is_torn, moved, not differences(state_of(pipe), state_of(_once()))


def clipped_backward() -> Told:
    """Each rank would clip by a norm of its own."""
    pipe = over_ranks(faulty(), [1] * dist.get_world_size(), 3)
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1), "two_pass", max_norm=1.0)
    loss = square(pipe(rows(6)), rows(6))
    error = told(lambda: eager_backward(loss, update))
    loss.backward()
    return error


# ------------------------------------------------------------------------------------------------------------- when


class Slow(nn.Module):
    """A linear layer whose backward takes 50 ms or more, and notes when it is over."""

    def __init__(self, ends: list[float]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._note: Callable[[float], None] = lambda moment: ends.append(moment)  # two runs of a step are both noted

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if output.requires_grad:
            output.register_hook(self._late)
        return output

    def _late(self, grad: Tensor) -> None:
        time.sleep(0.05)
        self._note(time.perf_counter())  # one clock for all processes of a machine


def moments(clip: str | None, loss: str) -> tuple[list[float], list[float]]:
    """When this rank updated its parameters, and when the slow backwards ended, which rank 0 has; of the last step."""
    ends: list[float] = []
    updates: list[float] = []
    torch.manual_seed(4)
    model = nn.Sequential(Slow(ends), *[nn.Linear(4, 4) for _ in range(dist.get_world_size() - 1)]).double()
    pipe = over_ranks(model, [1] * dist.get_world_size(), 4, checkpoint="never")

    def rule(param: Tensor, grad: Tensor) -> None:
        param.sub_(grad, alpha=0.1)
        updates.append(time.perf_counter())

    how: dict[str, Any] = {} if clip is None else {"clip": clip, "max_norm": 0.01}
    update = EagerUpdate(rule, **how)
    for step in range(2):
        ends.clear()
        updates.clear()
        pipe.step(rows(8, seed=step), rows(8), loss_fn=LOSSES[loss], optimizer=update)
    return updates, ends
