"""Programs that a Pipe runs wherever its stages stand: each gives the tensors that are left at its end.

    PROGRAMS["clipped"](made)      made(model, balance, chunks, **settings) makes each Pipe of the program
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tied_models
import torch
from law_models import Apply, normal
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils import _pytree as pytree

from pipeline import EagerUpdate, Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian


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


def on_host(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def name_of(config: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in config.values())
