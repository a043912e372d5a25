"""What do scripts do with replicas besides training? Each function is one, on every rank of 2 pipelines x 2 ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from replica_faults import Told, told
from replica_training import Found, batch, choosing, mean_loss, mesh_of, mixed, plain, travelling_alone
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline import Pipe
from pipeline.distributed.data_parallel.gradient_means import GradientReducer
from pipeline.distributed.wrapped import check_over_ranks, check_wrapped


def build(mesh: Any, seed: int = 4, model: Any = plain, balance: tuple[int, int] = (2, 3), **settings: Any) -> Pipe:
    torch.manual_seed(seed)
    return Pipe(model(), balance, 3, group=mesh["pp"], replicas=mesh["dp"], **settings)


def state(pipe: nn.Module) -> Found:
    return {name: value.detach().clone() for name, value in pipe.state_dict().items()}


def grads(pipe: nn.Module) -> Found:
    return {name: None if each.grad is None else each.grad.clone() for name, each in pipe.named_parameters()}


def beginnings() -> tuple[Found, Found, Found]:
    """State after a construction with other values in each replica; what replica 0 had; and a copy after a step."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()

    def model() -> nn.Sequential:
        found = mixed()
        found[2].running_mean.fill_(float(replica + 1))
        return found

    pipe = build(mesh, replica, model, (3, 5))
    torch.manual_seed(0)
    own = mixed()
    own[2].running_mean.fill_(1.0)
    found = state(pipe)
    copied = copy.deepcopy(pipe)
    x, y = batch(replica, 0, 7)
    torch.manual_seed(replica)
    pipe.step(x, y, loss_fn=mean_loss, optimizer=torch.optim.SGD(pipe.parameters(), 0.1))
    torch.manual_seed(replica)
    copied.step(x, y, loss_fn=mean_loss, optimizer=torch.optim.SGD(copied.parameters(), 0.1))
    return found, {name: own.state_dict()[name] for name in found}, {
        name: torch.equal(value, pipe.state_dict()[name]) for name, value in copied.state_dict().items()
    }


def joined_batch(entry: str) -> tuple[Found, Found]:
    """The gradients of the plain module on both halves at once, and the replicas' means."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    pipe = build(mesh)
    torch.manual_seed(4)
    whole = plain()
    halves = [batch(each, 0, 6) for each in range(2)]
    mean_loss(whole(torch.cat([x for x, _ in halves])), torch.cat([y for _, y in halves])).backward()
    x, y = halves[replica]
    if entry == "step":
        pipe.step(x, y, loss_fn=mean_loss)
    else:
        mean_loss(pipe(x), y).backward()
    found = grads(pipe)
    return found, {name: grads(whole)[name] for name in found}


def apart() -> Found:
    """What each replica may do by itself: evaluations, forwards without gradients, clipping; and what is its own."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    pipe = build(mesh, model=mixed, balance=(3, 5))
    x, y = batch(replica, 0, 7)
    found: Found = {}
    for number in range(2):
        for step in range(replica + 1):  # one replica evaluates twice
            pipe.evaluate(x, y, loss_fn=mean_loss)
            with torch.no_grad():
                pipe(x)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        found[f"loss {number}"] = pipe.step(x, y, loss_fn=mean_loss, optimizer=optimizer).loss
    if replica == 1:
        pipe.clip_grad_norm_(1.0)
        pipe.full_state_dict()
    return {**found, **dict(pipe.named_buffers()), **dict(pipe.named_parameters())}


def accumulated() -> tuple[Found, Found]:
    """`.grad` after two passes, one of them backward twice; and three means added up."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    pipe, once = build(mesh), build(mesh)
    total: Found = {}
    for number in range(2):
        x, y = batch(replica, number, 5)
        loss = mean_loss(pipe(x), y)
        loss.backward(retain_graph=number == 1)
        if number == 1:
            loss.backward()
        for _ in range(number + 1):
            once.step(x, y, loss_fn=mean_loss)
            total = {name: grad if name not in total else total[name] + grad for name, grad in grads(once).items()}
            once.zero_grad()
    return grads(pipe), total


def clipped() -> list[tuple[float, Found]]:
    """Norms and clipped gradients: by the optimizer's step, in a store, by hand."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    x, y = batch(replica, 0, 6)
    results = []
    pipe = build(mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), 1.0)
    before = state(pipe)
    pipe.step(x, y, loss_fn=mean_loss, optimizer=optimizer, clip_grad_norm=0.1)
    results.append((0.0, {name: before[name] - value for name, value in state(pipe).items()}))
    pipe = build(mesh)
    store = pipe.step(x, y, loss_fn=mean_loss, grads="store", clip_grad_norm=0.1).grads
    assert store is not None
    results.append((0.0, {name: store.get(parameter) for name, parameter in pipe.named_parameters()}))
    pipe = build(mesh)
    mean_loss(pipe(x), y).backward()
    results.append((float(pipe.clip_grad_norm_(0.1)), grads(pipe)))
    return results


def scaled() -> list[tuple[float, bool, bool]]:
    """Steps with a scaler, the second of which overflows in one replica: the scale, did it move, is all finite."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    pipe = build(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    results = []
    for step in range(3):
        x, y = batch(replica, step, 6)
        before = state(pipe)
        x = x * (float("inf") if step == 1 and replica == 1 else 1.0)
        pipe.step(x, y, loss_fn=mean_loss, optimizer=optimizer, scaler=scaler, clip_grad_norm=1.0)
        moved = [not torch.equal(value, before[name]) for name, value in state(pipe).items()]
        finite = all(bool(value.isfinite().all()) for value in state(pipe).values())
        results.append((scaler.get_scale(), any(moved), finite))
    return results


def hooked() -> tuple[Found, list[str]]:
    """Hooks of parameters act once, on the mean."""
    mesh = mesh_of()
    pipe, plain_one = build(mesh), build(mesh)
    x, y = batch(mesh["dp"].get_local_rank(), 0, 6)
    seen: list[str] = []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append(name) or grad.sign())
    pipe.step(x, y, loss_fn=mean_loss)
    plain_one.step(x, y, loss_fn=mean_loss)
    expected = {name: grad.sign() for name, grad in grads(plain_one).items()}
    return {name: torch.equal(grad, expected[name]) for name, grad in grads(pipe).items()}, seen


def stored() -> list[str]:
    """The order in which a store has its gradients, one of which this replica did not compute."""
    mesh = mesh_of(dist.get_world_size())
    pipe = Pipe(choosing(), [2, 2], 3, devices=["cpu"] * 2, replicas=mesh["dp"], mixes_rows=True)
    x, y = batch(0, 0, 6)
    x[::2] = 1.0 - 2 * mesh["dp"].get_local_rank()
    with travelling_alone(True):
        store = pipe.step(x, y, loss_fn=mean_loss, grads="store").grads
    assert store is not None
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    return [names[id(parameter)] for parameter, _ in store.items()]


def order_of_events(alone: bool) -> list[str]:
    """Of a step with three stages in this process: backwards of the first layer, and gradients that are sent."""
    mesh = mesh_of(dist.get_world_size())
    pipe = Pipe(plain(), [2, 2, 1], 3, devices=["cpu"] * 3, schedule="gpipe", replicas=mesh["dp"])
    x, y = batch(mesh["dp"].get_local_rank(), 0, 6)
    events: list[str] = []

    def backward(grad: Tensor) -> None:
        events.append("backward")

    pipe[0].register_forward_hook(lambda module, given, output: output.register_hook(backward) and None)
    kept = GradientReducer.send

    def noted(means: GradientReducer, *args: Any) -> None:
        events.append("sums")
        kept(means, *args)

    GradientReducer.send = noted  # type: ignore[method-assign]
    try:
        with travelling_alone(alone):
            pipe.step(x, y, loss_fn=mean_loss)
    finally:
        GradientReducer.send = kept  # type: ignore[method-assign]
    return events


def within_ddp(how: dict[str, bool]) -> Found:
    """DistributedDataParallel around a Pipe over ranks, and a Pipe with replicas: are they the same to the bit?"""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(4)
    inner = Pipe(plain(), [2, 3], 3, group=mesh["pp"])
    wrapped: Any = DistributedDataParallel(inner, process_group=mesh["dp"].get_group(), **how)
    ours = build(mesh)
    for module, owner in ((wrapped, inner), (ours, ours)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        for step in range(3):
            x, y = batch(replica, step, 6 + step)
            mean_loss(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: torch.equal(value, ours.state_dict()[name]) for name, value in inner.state_dict().items()}


class Frozen(nn.Module):
    """Multiplies by a number that the user holds, too."""

    def __init__(self, number: Tensor) -> None:
        super().__init__()
        self.numbers = [number]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.numbers[0]


def captured() -> tuple[Found, Found]:
    """The gradient of the input and of a leaf that is no parameter is each replica's own."""
    mesh = mesh_of()
    replica = mesh["dp"].get_local_rank()
    found: list[Found] = []
    for settings in ({"group": mesh["pp"], "replicas": mesh["dp"]}, {"devices": ["cpu"] * 2}):
        torch.manual_seed(4)
        number = torch.tensor(1.0 + replica, dtype=torch.float64, requires_grad=True)
        pipe = Pipe(nn.Sequential(nn.Linear(4, 4).double(), Frozen(number)), [1, 1], 3, **settings)
        x, y = batch(replica, 0, 6)
        x.requires_grad_()
        pipe.step(x, y, loss_fn=counted)
        found.append({"input": x.grad, **({"number": number.grad} if number.grad is not None else {})})
    return found[0], found[1]


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), target.abs().ceil().sum()


def refused() -> list[tuple[str, Told]]:
    """What cannot be."""
    mesh = mesh_of()
    x, y = batch(0, 0, 6)
    pipe = build(mesh)
    alone = Pipe(plain(), [2, 3], 3, devices=["cpu"] * 2, replicas=dist.group.WORLD)
    beside = Pipe(plain(), [2, 3], 3, devices=["cpu"] * 2, replicas=mesh["dp"])
    ddp = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 4)), nn.Tanh())
    sync = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.SyncBatchNorm(4)))
    loss = mean_loss(alone(x), y)

    def nest(output: Tensor, target: Tensor) -> Tensor:
        alone(x)
        return mean_loss(output, target)

    cases = {
        "nowhere": lambda: Pipe(plain(), [2, 3], 3, replicas=mesh["dp"]),
        "the same": lambda: Pipe(plain(), [2, 3], 3, group=mesh["pp"], replicas=dist.group.WORLD),
        "no group": lambda: Pipe(plain(), [2, 3], 3, devices=["cpu"] * 2, replicas="dp"),
        "second order": lambda: torch.autograd.grad(loss, list(alone.parameters()), create_graph=True),
        "within": lambda: alone.step(x, y, loss_fn=nest),
        "within replicas": lambda: beside.step(x, y, loss_fn=lambda output, target: mean_loss(pipe(x), target)),
        "ddp": lambda: Pipe(ddp, [2, 1], devices=["cpu"] * 2),
        "sync": lambda: Pipe(sync, [1, 1], group=mesh["pp"]),
        "sync replicas": lambda: Pipe(sync, [1, 1], devices=["cpu"] * 2, replicas=mesh["dp"]),
    }
    results = [(what, told(case)) for what, case in cases.items()]
    pipe.step(x, y, loss_fn=mean_loss)
    return results


def sharded() -> list[tuple[str, Told]]:
    """Layers that FSDP2 has sharded, and parameters that tensor parallelism has."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = mesh_of()
    model = plain()
    fully_shard(model[2], mesh=mesh["dp"])
    both = plain()
    fully_shard(both, mesh=mesh["dp"])
    tensors = plain()
    parallelize_module(tensors, mesh["dp"], {"0": ColwiseParallel()})
    found = [("layer", told(lambda: Pipe(model, [2, 3], devices=["cpu"] * 2)))]
    found.append(("all", told(lambda: Pipe(both, [2, 3], group=mesh["pp"]))))
    found.append(("tensors", told(lambda: Pipe(tensors, [2, 3], group=mesh["pp"]))))
    check_wrapped(tensors)
    check_over_ranks(nn.Sequential(nn.BatchNorm1d(3)))
    return found
