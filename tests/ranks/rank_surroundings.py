"""Does what stands around a call count the same on ranks? Scripts for one_and_many.py.

    layers that draw from Python's and numpy's generators; a default device; values that torch has not computed yet
"""

from __future__ import annotations

import random

import numpy
import torch
from one_and_many import Found, Make, state_of
from rank_models import rows, square
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.curvature import Hessian
from pipeline.gradients.eager import EagerUpdate


class Depth(nn.Linear):
    """Stochastic depth, and noise of numpy's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(numpy.random.rand()) if random.random() < 0.5 else x


def drawn_outside_torch(make: Make, stages: int, schedule: str, checkpoint: str) -> Found:
    """Each rank's generators stand elsewhere; a call leaves them there, so a shuffle is the script's own."""
    torch.manual_seed(3)
    model = nn.Sequential(*[Depth(4, 4) for _ in range(2 * stages)]).double()
    pipe = make(model, [2] * stages, 4, schedule=schedule, checkpoint=checkpoint)
    found: Found = {}
    random.seed(5)
    numpy.random.seed(5)
    for step in range(3):
        pipe.zero_grad()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        update = EagerUpdate(optimizer, clip="two_pass", max_norm=0.1) if step == 2 else None
        found[f"loss {step}"] = pipe.step(rows(8, seed=step), rows(8), loss_fn=square, optimizer=update).loss
        out = pipe(rows(8, seed=step))
        square(out, rows(8)).backward()
        found[f"out {step}"] = out.detach()
        found |= state_of(pipe, step)
        found[f"next {step}"] = [random.random(), float(numpy.random.rand())]
    return found


def default_device(make: Make, stages: int, entry: str) -> Found:
    """A default device on which nothing can be computed: only what a script or a layer makes may be there."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages)]).double()
    pipe = make(model, [1] * stages, 3)
    x, target = rows(6), rows(6, seed=1)
    found: Found = {}
    with torch.device("meta"):
        for step in range(3):
            if entry == "forward":
                loss = square(pipe(x), target)
                loss.backward()
                found[f"norm {step}"] = pipe.clip_grad_norm_(1.0)
            elif entry == "curvature":
                H = Hessian(pipe, (x, target), square, seed=3)
                found[f"trace {step}"] = round(H.trace(3).value, 9)  # sums over ranks are added in another order
                found[f"eigenvalues {step}"] = H.top_eigenpairs(2).values.round(decimals=9)
                loss = H.loss()
            elif entry == "evaluate":
                loss = pipe.evaluate(x, target, loss_fn=square).loss
            elif entry == "store":
                loss = pipe.step(x, target, loss_fn=square, grads="store", clip_grad_norm=1.0, trace=True).loss
            else:
                optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
                update = EagerUpdate(optimizer, clip="two_pass", max_norm=0.1) if entry == "eager" else optimizer
                loss = pipe.step(x, target, loss_fn=square, optimizer=update).loss
            found[f"loss {step}"] = loss.detach()
            found |= state_of(pipe, step)
    return found


class Turned(nn.Module):
    """Complex numbers, passed on with their conjugates and the negative of their imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = given
        for other in others:
            x = x + other.mean()
        made = x @ self.weight / 4
        return made.conj(), made, made.conj().imag, made[0, 0].conj(), made[0, 0].conj().imag


class Real(nn.Module):
    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return given[0].real + given[1].imag + given[2]


def lazy_values(make: Make, stages: int, entry: str, checkpoint: str) -> Found:
    torch.manual_seed(3)
    model = nn.Sequential(*[Turned() for _ in range(stages)], Real())
    pipe = make(model, [1] * (stages - 1) + [2], 3, checkpoint=checkpoint, mixes_rows=True)
    base = rows(6).to(torch.complex128).requires_grad_()
    found: Found = {}
    for step in range(3):
        if entry == "step":
            found[f"loss {step}"] = pipe.step((base.conj(),), rows(6), loss_fn=square).loss
        else:
            loss = square(pipe((base.conj(),)), rows(6))
            loss.backward()
            found[f"loss {step}"] = loss.detach()
        assert base.grad is not None
        found[f"x.grad {step}"] = base.grad.clone()
        found |= state_of(pipe, step)
    return found


class OwnDraw(nn.Linear):
    def __init__(self, generator: torch.Generator, draws: bool) -> None:
        super().__init__(4, 4)
        self.generator = generator
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made * torch.rand((), generator=self.generator) if self.draws else made


def shared_generator(draws: bool) -> str:
    """Both ranks hold one generator; what a call says if one of them, or none, draws from it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    pipe = Pipe(nn.Sequential(OwnDraw(generator, False), OwnDraw(generator, draws)), [1, 1], 2)
    try:
        pipe.step(torch.ones(4, 4), loss_fn=lambda out, _: out.square().mean())
    except RuntimeError as error:
        return str(error)
    return ""


class Rotary(nn.Linear):
    """A layer with a table that others have as well, as torchtune's attentions have."""

    def __init__(self, table: nn.Module | Tensor, writes: bool) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.writes = writes
        if isinstance(table, Tensor):
            self.register_buffer("angles", table)
        else:
            self.table = table

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles if "angles" in self._buffers else self.table.angles
        if self.writes:
            with torch.no_grad():
                angles.mul_(0.5)
        return super().forward(x * angles.cos())


def shared_buffer(is_module: bool, writer: int | None) -> tuple[str, list[Tensor | None]]:
    """Three stages have one buffer; what a call says if one of them, or none, writes it. And the gradients."""
    torch.manual_seed(2)
    table: nn.Module | Tensor = torch.rand(4, dtype=torch.float64)
    if is_module:
        holder = nn.Module()
        holder.register_buffer("angles", table)
        table = holder
    pipe = Pipe(nn.Sequential(*[Rotary(table, number == writer) for number in range(3)]), [1, 2], 2)
    words = ""
    for _ in range(2):
        pipe.zero_grad()
        try:
            pipe.step(torch.ones(4, 4, dtype=torch.float64), loss_fn=lambda out, _: out.square().mean())
        except RuntimeError as error:
            words = str(error)
    return words, [parameter.grad for parameter in pipe.parameters()]
