"""Two pipelines of two ranks: do they train as two Pipes in one process whose gradients somebody averages by hand?

    rank 0 - rank 1     pipeline 0, mini-batches of its own         by hand: Pipe 0, Pipe 1 on devices=[...];
      |        |                                                    .grad = (grad 0 + grad 1) / 2, in both
    rank 2 - rank 3     pipeline 1

Every rank runs the left side, some rank the right side of each case; what differs is returned in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from one_and_many import Compared, compared, differences
from rank_models import rows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline import Pipe
from pipeline.distributed.data_parallel import shards
from pipeline.distributed.remote_layer import RemoteLayer

Found = dict[str, Any]
Sequential = Callable[[], nn.Sequential]
LossFn = Callable[[Any, Any], Any]
SEED, STEPS = 31, 2


def mesh_of(pipelines: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (pipelines, dist.get_world_size() // pipelines), mesh_dim_names=("dp", "pp"))


@contextmanager
def travelling_alone(every: bool) -> Iterator[None]:
    """Within: the gradients of each stage are sent by themselves, however small they are."""
    kept, shards.SMALL = shards.SMALL, 0 if every else shards.SMALL
    try:
        yield
    finally:
        shards.SMALL = kept


# ---------------------------------------------------------------------------------------------------------- models


def mixed() -> nn.Sequential:
    """With dropout and running statistics."""
    return nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6),
        nn.Linear(6, 4),
    ).double()  # fmt: skip


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def without_parameters() -> nn.Sequential:
    """Whose last layers have none."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Softmax(1)).double()


class Multiply(nn.Module):
    """A layer that may have its weight in common with another."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def tied() -> nn.Sequential:
    """One weight in the layers 0, 1 and 3."""
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    return nn.Sequential(Multiply(weight), Multiply(weight), nn.Linear(4, 4).double(), Multiply(weight))


class Lookup(nn.Module):
    """Rows of a table, of which the backward gives only those that were looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0].abs() * 10).long().clamp(max=19)) + 0 * x


def sparse() -> nn.Sequential:
    return nn.Sequential(Lookup(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


class Choosing(nn.Module):
    """Computes with one of three layers, as the first number says; the third is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        which = 0 if x.flatten()[0] > 0 else 1
        return torch.tanh(self.choices[which](x)) * 0 + x + self.choices[which].weight.sum()


def choosing() -> nn.Sequential:
    return nn.Sequential(Choosing(), nn.Identity(), nn.Linear(4, 4), nn.Tanh()).double()


def strided() -> nn.Sequential:
    """Weights that are not contiguous, and one with no numbers at all."""
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 4)).double()
    model[1].weight.data = torch.randn(2, 2, 3, 1, dtype=torch.float64).permute(2, 3, 0, 1)
    model[3].register_parameter("empty", nn.Parameter(torch.empty(0, 3).double()))
    return model


def half() -> nn.Sequential:
    return plain().bfloat16()


# ---------------------------------------------------------------------------------------------------------- losses


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.to(output.device)).square().sum(1).mean()


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A weighted mean: the weights' sum is another one in each replica."""
    target = target.to(output.device)
    weights = target[:, 0].abs().mul(8).ceil() + 1  # a count is a whole number
    return ((output - target).square().sum(1) * weights).sum(), weights.sum()


class Weighted(nn.Module):
    """A loss with a parameter of its own, or with a number."""

    def __init__(self, learns: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64)) if learns else 0.7

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output * self.weight, target)


# -------------------------------------------------------------------------------------------------------- training


def batch(replica: int, step: int, count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    first = 100 * replica + 2 * step
    return rows(count, seed=first).to(dtype), rows(count, seed=first + 1).to(dtype)


def gradients(pipe: Pipe, x: Tensor, y: Tensor, entry: str, loss_fn: LossFn) -> Tensor:
    """One backward pass, after which `.grad` is set. Returns the loss."""
    if entry == "forward":
        loss = loss_fn(pipe(x), y)
        loss.backward()
        return loss.detach()
    if entry == "store":
        step = pipe.step(x, y, loss_fn=loss_fn, grads="store")
        assert step.grads is not None
        step.grads.assign()
        return step.loss
    return pipe.step(x, y, loss_fn=loss_fn).loss


def by_hand(
    build: Sequential, balance: Sequence[int], entry: str, counts: Sequence[int], loss: str, **settings: Any
) -> list[Found]:
    """What each replica should know after each step."""
    pipes, losses, states, optimizers = [], [], [], []
    for replica in range(len(counts)):
        torch.manual_seed(1)
        pipes.append(Pipe(build(), balance, 3, devices=["cpu"] * len(balance), **settings))
        losses.append(loss_named(loss, pipes[-1]))
        torch.manual_seed(SEED + replica)
        states.append(torch.get_rng_state())
        optimizers.append(optimizer_of(pipes[-1], losses[-1]))
    found: list[Found] = [{} for _ in counts]
    for step in range(STEPS):
        for replica, (pipe, loss_fn) in enumerate(zip(pipes, losses, strict=True)):
            torch.set_rng_state(states[replica])
            x, y = batch(replica, step, counts[replica] + step, dtype_of(pipe))
            keep_full(pipe, True)
            found[replica][f"loss {step}"] = gradients(pipe, x, y, entry, loss_fn)
            states[replica] = torch.get_rng_state()
        everything = [[*trained(pipe, loss_fn)] for pipe, loss_fn in zip(pipes, losses, strict=True)]
        for same in zip(*everything, strict=True):
            mean = mean_of([parameter.grad for _, parameter in same])
            for _, parameter in same:
                parameter.grad = None
                keep_full(parameter, False)
                parameter.grad = None if mean is None else mean.to(parameter.dtype, copy=True)
        for replica, optimizer in enumerate(optimizers):
            note(found[replica], step, pipes[replica], losses[replica])
            finish(optimizer, pipes[replica])
    return found


def keep_full(of: Pipe | Tensor, full: bool) -> None:
    """Whether gradients of half precision come as float32: they are rounded once, when they are means."""
    for parameter in [of] if isinstance(of, Tensor) else of.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32 if full else None


def over_ranks(build: Sequential, balance: Sequence[int], entry: str, count: int, loss: str, **settings: Any) -> Found:
    """What this rank knows. `settings` say where the stages and the replicas are."""
    replicas: Any = settings["replicas"]
    replica = dist.get_rank(replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas)
    torch.manual_seed(1 + replica)  # replica 0's values count
    pipe = Pipe(build(), balance, 3, **settings)
    loss_fn = loss_named(loss, pipe)
    is_first = not isinstance(settings.get("group"), DeviceMesh) or settings["group"].get_local_rank() == 0
    torch.manual_seed(SEED + replica if is_first else dist.get_rank())
    optimizer = optimizer_of(pipe, loss_fn)
    found: Found = {}
    for step in range(STEPS):
        x, y = batch(replica, step, count + step, dtype_of(pipe))
        found[f"loss {step}"] = gradients(pipe, x, y, entry, loss_fn)
        is_last = not isinstance(list(pipe)[-1], RemoteLayer)
        note(found, step, pipe, loss_fn if is_last else None)
        finish(optimizer, pipe)
    return found


def finish(optimizer: torch.optim.Optimizer, pipe: Pipe) -> None:
    optimizer.step()
    optimizer.zero_grad()
    pipe.zero_grad()


def loss_named(name: str, pipe: Pipe) -> Any:
    def penalized(output: Tensor, target: Tensor) -> Tensor:
        return mean_loss(output, target) + pipe[0].weight.square().sum()

    return {"mean": mean_loss, "counted": counted_loss, "weighted": Weighted(), "penalized": penalized}[name]


def trained(pipe: Pipe, loss_fn: Any, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from pipe.named_parameters(remove_duplicate=remove_duplicate)
    if isinstance(loss_fn, nn.Module):
        yield from ((f"loss.{name}", parameter) for name, parameter in loss_fn.named_parameters())


def optimizer_of(pipe: Pipe, loss_fn: Any) -> torch.optim.Optimizer:
    parameters = [*pipe.parameters(), *(loss_fn.parameters() if isinstance(loss_fn, nn.Module) else [])]
    if any(parameter.numel() == 80 for parameter in parameters):  # the table, which AdamW does not take
        parameters = [parameter for parameter in parameters if parameter.numel() != 80]
    return torch.optim.AdamW(parameters, lr=0.02)


def dtype_of(pipe: Pipe) -> torch.dtype:
    return next((parameter.dtype for parameter in pipe.parameters() if parameter.numel()), torch.float64)


def mean_of(grads: Sequence[Tensor | None]) -> Tensor | None:
    """In the order of the replicas; a missing one counts as zero."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    there = [grad.coalesce() if grad.is_sparse else grad for grad in there]
    total = there[0].float() if there[0].dtype == torch.bfloat16 else there[0]
    for grad in there[1:]:
        total = total + grad
    mean = (total / len(grads)).to(there[0].dtype)
    return mean.coalesce() if mean.is_sparse else mean


def note(found: Found, step: int, pipe: Pipe, loss_fn: Any) -> None:
    for name, parameter in trained(pipe, loss_fn, remove_duplicate=False):
        grad = parameter.grad
        found[f"{step} {name}"] = parameter.detach().clone()
        found[f"{step} {name}.grad"] = None if grad is None else (grad.to_dense() if grad.is_sparse else grad).clone()
        found[f"{step} {name} is sparse"] = grad is not None and grad.is_sparse
    for name, buffer in pipe.named_buffers():
        found[f"{step} {name}"] = buffer.clone()


# ------------------------------------------------------------------------------------------------------------ jobs


def compare(cases: Sequence[dict[str, Any]], in_process: bool = False) -> list[Compared]:
    """For each case what differs, what this rank knows and what there is to know.

    Args:
        cases: model, balance, entry, schedule; rows of each replica (counts), loss, alone.
        in_process: a process is a replica, with all stages.
    """
    mesh = mesh_of(dist.get_world_size() if in_process else 2)
    replica = mesh["dp"].get_local_rank()

    def words_of(case: dict[str, Any]) -> tuple[tuple[Any, ...], list[int], dict[str, Any]]:
        counts = case.get("counts", [7] * mesh["dp"].size())
        settings = {name: case[name] for name in ("schedule", "checkpoint", "workers") if name in case}
        settings["mixes_rows"] = case["model"] == "choosing"  # by the first number of a chunk
        return (MODELS[case["model"]], case["balance"], case["entry"]), counts, settings

    def alone(case: dict[str, Any]) -> Found:
        """Of each name, what each replica should know."""
        how, counts, settings = words_of(case)
        replicas = by_hand(*how, counts, case.get("loss", "mean"), **settings)
        return {name: [known[name] for known in replicas] for name in replicas[0]}

    def here(case: dict[str, Any]) -> Found:
        how, counts, settings = words_of(case)
        where = {"devices": ["cpu"] * len(case["balance"])} if in_process else {"group": mesh["pp"]}
        with travelling_alone(case.get("alone", False)):
            loss = case.get("loss", "mean")
            return over_ranks(*how, counts[replica], loss, replicas=mesh["dp"], **where, **settings)

    def differ(found: Found, known: Found) -> list[str]:
        return differences(found, {name: values[replica] for name, values in known.items()})

    return compared(cases, alone, here, differ)


MODELS: dict[str, Sequential] = {
    "mixed": mixed,
    "plain": plain,
    "without parameters": without_parameters,
    "tied": tied,
    "sparse": sparse,
    "choosing": choosing,
    "strided": strided,
    "half": half,
}
