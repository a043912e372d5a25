"""Pipes on simulated accelerators: the host's numbers, bit for bit, without a missing wait, in the memory foretold.

Kernels of the simulated accelerator are the host's, so what a Pipe computes on any devices must be what the plain
module computes on the host. That nothing raised a race is a part of every test here (conftest.py).
"""

from __future__ import annotations

import gc
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import law_check
import pytest
import tied_models
import torch
from cover import pairwise
from law_check import AXES, Result, differences, expect, observe
from law_models import MODELS, Apply, normal
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

from pipeline import EagerUpdate, Pipe
from pipeline.common.places import Place
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.execution import drivers
from pipeline.transports.local import Local
from scheduler import by_name, simulate

# These compute with tensors of the host wherever they stand, or with attention of which the host has a kernel.
ON_THE_HOST = {"private_generator", "closure", "encoder_layers"}


def sim(index: int) -> torch.device:
    return torch.device("sim", index)


PLACEMENTS: dict[str, Callable[[int], list[Any]]] = {
    "one": lambda stages: [sim(1)] * stages,
    "two": lambda stages: [sim(2 * (2 * stage // stages)) for stage in range(stages)],
    "three": lambda stages: [sim(stage % 3) for stage in range(stages)],
    "zigzag": lambda stages: [sim((0, 1, 2, 1)[stage % 4]) for stage in range(stages)],
    "host between": lambda stages: [(sim(0), "cpu", sim(2))[stage % 3] for stage in range(stages)],
    "host first": lambda stages: ["cpu", *(sim(stage % 2) for stage in range(stages - 1))],
    "host last": lambda stages: [*(sim(stage % 2) for stage in range(stages - 1)), "cpu"],
    "named": lambda stages: [Place(sim(0), str(stage)) for stage in range(stages)],
    "named on two": lambda stages: [Place(sim(stage // 2 % 2), str(stage)) for stage in range(stages)],
}
WORKERS = (None, "inline", "threads")


@contextmanager
def side_streams() -> Iterator[None]:
    """Within: on each device another stream than the default one is current, for which no other waits."""
    before = [torch.accelerator.current_stream(index) for index in range(3)]
    for index in range(3):
        torch.accelerator.set_stream(torch.Stream(sim(index)))
    torch.accelerator.set_device_index(0)
    try:
        yield
    finally:
        for index in range(3):
            torch.accelerator.synchronize(index)
        gc.collect()
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)


STREAMS: dict[str, Callable[[], AbstractContextManager[None]]] = {"default": nullcontext, "others": side_streams}


def on_host(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def name_of(config: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in config.values())


# --------------------------------------------------------------------------------------- what the plain module computes

LAWS: dict[str, Sequence[Any]] = {
    **AXES,
    "model": [model for model in MODELS if model not in ON_THE_HOST],
    "drive": tuple(PLACEMENTS),
    "workers": WORKERS,
    "streams": tuple(STREAMS),
    "own hosts": (False, True),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of torch's reentrant checkpoint
@pytest.mark.parametrize("config", pairwise(LAWS), ids=name_of)
def test_a_pipe_on_accelerators_gives_what_the_plain_module_gives(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def placed(stages: int) -> dict[str, Any]:
        return {"devices": PLACEMENTS[config["drive"]](stages), "workers": config["workers"]}

    monkeypatch.setitem(law_check.DRIVES, config["drive"], placed)
    with STREAMS[config["streams"]](), torch.sim.own_hosts() if config["own hosts"] else nullcontext():
        found = Result(**on_host(vars(observe(config))))
    assert not differences(found, expect(config))


# ------------------------------------------------------------------------------------- what a Pipe on the host computes


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.3), nn.Softplus(), nn.Linear(6, 3)
    ).double()


BALANCE = [2, 1, 2, 2]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return normal(8, 4, seed=seed), normal(8, 3, seed=seed + 100)


def pipe_of(made: Callable[..., Pipe], **settings: Any) -> Pipe:
    return made(network(), BALANCE, 4, **settings)


def left(pipe: Pipe) -> list[Tensor]:
    return [*pipe.parameters(), *pipe.buffers(), *(param.grad for param in pipe.parameters() if param.grad is not None)]


def training(made: Callable[..., Pipe], clip: float | None = None, **settings: Any) -> list[Tensor]:
    """Six steps: some of those that validate, some that do not."""
    pipe = pipe_of(made, **settings)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, foreach=False)
    losses = []
    for seed in range(6):
        x, y = batch(seed)
        losses.append(pipe.step(x, y, loss_fn=mse_loss, optimizer=optimizer, clip_grad_norm=clip).loss)
    return [*losses, *left(pipe), pipe.evaluate(*batch(9), loss_fn=mse_loss).outputs]


def by_forward(made: Callable[..., Pipe]) -> list[Tensor]:
    pipe = pipe_of(made, schedule="gpipe", checkpoint="always")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for seed in range(6):
        x, y = batch(seed)
        optimizer.zero_grad()
        loss = mse_loss(pipe(x.requires_grad_()), y.to(pipe.devices[-1]))
        loss.backward(retain_graph=seed == 2)
        if seed == 2:
            loss.backward()
        optimizer.step()
        losses += [loss, x.grad]
    return [*losses, *left(pipe)]


def eagerly(made: Callable[..., Pipe]) -> list[Tensor]:
    pipe = pipe_of(made, schedule="zb-h1", checkpoint="never")
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, foreach=False))
    losses = []
    for seed in range(6):
        losses.append(pipe.step(*batch(seed), loss_fn=mse_loss, optimizer=update).loss)
    return [*losses, *left(pipe)]


def second_order(made: Callable[..., Pipe]) -> list[Tensor]:
    pipe = pipe_of(made)
    x, y = batch(1)
    x.requires_grad_()
    wanted = [x, *pipe.parameters()]
    grads = torch.autograd.grad(mse_loss(pipe(x), y.to(pipe.devices[-1])), wanted, create_graph=True)
    inner = sum((grad.square().sum().to("cpu") for grad in grads), torch.zeros((), dtype=torch.float64))
    return [*grads, *torch.autograd.grad(inner, wanted)]


def curvature(made: Callable[..., Pipe], matrix: Any) -> list[Tensor]:
    pipe = pipe_of(made).eval()
    vectors = {name: normal(*param.shape, seed=5).to(param.device) for name, param in pipe.named_parameters()}
    operator = matrix(pipe, [batch(1), batch(2)], mse_loss)
    return pytree.tree_leaves([operator @ vectors for _ in range(3)])


def ties(made: Callable[..., Pipe]) -> list[Tensor]:
    torch.manual_seed(3)
    pipe = made(tied_models.embedding_and_head(), [1, 2, 2, 1], 3)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, foreach=False)
    tokens = torch.arange(24).view(6, 4) % 9
    losses = [
        pipe.step(tokens, None, loss_fn=lambda out, _: out.square().mean(), optimizer=optimizer).loss for _ in range(4)
    ]
    return [*losses, *left(pipe)]


def two_in_one_loss(made: Callable[..., Pipe]) -> list[Tensor]:
    """Their last stages are on different devices, where there are several."""
    pipes = pipe_of(made), made(network(), [3, 2, 2], 2)
    for seed in range(3):
        x, y = batch(seed)
        sum(mse_loss(pipe(x), y.to(pipe.devices[-1])).to("cpu") for pipe in pipes).backward()
    return [*left(pipes[0]), *left(pipes[1])]


def within_another(made: Callable[..., Pipe]) -> list[Tensor]:
    torch.manual_seed(2)
    inner = made(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), [2, 1], 2)
    layer = Apply(lambda x: inner(x).to(x.device))  # the outer one does not place its layers
    pipe = made(nn.Sequential(nn.Linear(4, 4).double(), layer, nn.Linear(4, 3).double()), [1, 1, 1], 2)
    losses = []
    for seed in range(3):
        x, y = batch(seed)
        losses.append(mse_loss(pipe(x), y.to(pipe.devices[-1])))
        losses[-1].backward()
    return [*losses, *left(pipe), *left(inner)]


PROGRAMS: dict[str, Callable[[Callable[..., Pipe]], list[Tensor]]] = {
    **{f"training, {mode}": partial(training, checkpoint=mode) for mode in ("always", "except_last", "never")},
    **{f"training, {name}": partial(training, schedule=name) for name in ("gpipe", "zb-h1", "eager-1f1b")},
    "clipped": partial(training, clip=0.5),
    "deferred batch norm": partial(training, deferred_batch_norm=True),
    "forward and backward": by_forward,
    "eager updates": eagerly,
    "second order": second_order,
    **{matrix.__name__: partial(curvature, matrix=matrix) for matrix in (Hessian, GaussNewton, EmpiricalFisher)},
    "ties": ties,
    "two in one loss": two_in_one_loss,
    "one within another": within_another,
}
# torch's own sums over devices have another order: of norms, and of what autograd's threads add to one gradient.
ROUNDED = {"clipped", "second order"}
AROUND = {"place": tuple(PLACEMENTS), "workers": WORKERS, "streams": tuple(STREAMS)}


@pytest.mark.parametrize("case", pairwise({"program": tuple(PROGRAMS), **AROUND}), ids=name_of)
def test_a_pipe_on_accelerators_gives_what_one_on_the_host_gives(case: dict[str, Any]) -> None:
    program = PROGRAMS[case["program"]]

    def made(
        place: Callable[[int], list[Any]], model: nn.Sequential, balance: list[int], chunks: int, **settings: Any
    ) -> Pipe:
        return Pipe(model, balance, chunks, devices=place(len(balance)), workers=case["workers"], **settings)

    torch.manual_seed(7)
    with STREAMS[case["streams"]]():
        found = on_host(program(partial(made, PLACEMENTS[case["place"]])))
    torch.manual_seed(7)
    expected = on_host(program(partial(made, lambda stages: ["cpu"] * stages)))
    if case["program"] in ROUNDED:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    else:
        assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)
