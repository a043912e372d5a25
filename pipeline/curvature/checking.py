"""Checks of curvature products: laws that hold for any matrix of second derivatives, tried on random vectors.

    again       H v twice                        the same bits
    linear      H (2 u - 3 v)                    2 H u - 3 H v
    symmetric   u . H v                          v . H u
    stages      each stage's rule                finite differences of that stage alone, to show which one is wrong
    loss        (d2L/dy2) d                      finite differences of the loss's gradient by the output
    gradient    H v                              [gradient(w + e v) - gradient(w - e v)] / 2e, parameters never written
    one stage   H v                              the whole model as one stage, double backward through all of it

Finite differences find what torch's derivatives are wrong for; the last finds what would be the pipeline's fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.curvature.products.finite_differences import Precision, error_of
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import HOST, Space, Vec, add_, copy, scale_

if TYPE_CHECKING:
    from pipeline.curvature.operators import Operator

_IN_HALF = 0.5  # of finite differences: rounding alone makes a third


@dataclass(frozen=True, eq=False)
class Report(Result):
    """The result of a check.

    Attributes:
        matrix: the matrix's name.
        what: the comparisons, in words, line by line.
        errors: relative errors.
        limits: the largest errors that are allowed.
        notes: the comparisons that were left out, and why; the operations that are computed in another way.
    """

    matrix: str
    what: list[str]
    errors: list[float]
    limits: list[float]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether all laws hold."""
        return all(error <= bound for error, bound in zip(self.errors, self.limits, strict=True))

    def lines(self) -> Iterator[str]:
        width = max(map(len, self.what))
        yield f"check of the {self.matrix}: " + ("all is well" if self.ok else "SOMETHING IS WRONG")
        for comparison, error, bound in zip(self.what, self.errors, self.limits, strict=True):
            verdict = "" if error <= bound else "   WRONG"
            yield f"  {comparison:<{width}}  error {error:8.1e}   at most {bound:7.0e}{verdict}"
        yield from (f"  {note}" for note in self.notes)


def check(op: Operator, seed: int = 0) -> Report:
    """Try the laws on random vectors; costs about ten products, and two gradients.

    Args:
        op: the operator; over ranks all call it.
        seed: of the vectors.

    Returns:
        A report; print it. `ok` says whether all is well.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        >>> H = Hessian(model, (torch.randn(5, 3).double(), torch.randn(5, 2).double()), nn.functional.mse_loss)
        >>> check(H).ok
        True
    """
    space = op.space
    u, v = _unit(space, seed, 0), _unit(space, seed, 1)
    rows: list[tuple[str, float, float]] = []
    notes: list[str] = []
    Hu, Hv = op.products([u])[0], op.products([v])[0]
    differences = _stages(op, v)
    precision = max([Precision.of([space.dtype]), *[row[2] for row in differences]])
    rows.append(("the same product again", _distance(space, op.products([v])[0], Hv), 0.0))
    mixed, expected = (add_(scale_(copy(one), 2.0), other, -3.0) for one, other in ((u, v), (Hu, Hv)))
    rows.append(("linear: H (2 u - 3 v)", _distance(space, op.products([mixed])[0], expected), precision.exact))
    dots = space.dots([u, v, Hu, Hv], [Hu, Hv])
    u_Hv, v_Hu = float(dots[0, 1]), float(dots[1, 0])
    norm_Hu, norm_Hv = float(dots[2, 0]) ** 0.5, float(dots[3, 1]) ** 0.5
    rows.append(("symmetric: u . H v = v . H u", abs(u_Hv - v_Hu) / max(norm_Hu, norm_Hv, 1e-300), precision.exact))
    if op.has_gradient and op.captures:
        notes.append("finite differences of the gradient: not done, a layer has a parameter in a list or a closure")
    elif op.has_gradient:
        differences.append(("the gradient", _differences(op, v, Hv, precision), precision))
    else:
        notes.append("finite differences of the gradient: not of this matrix, which is no derivative of it")
    for name, error, its_precision in differences:
        bound = _IN_HALF if its_precision.is_half else its_precision.limit
        rows.append((f"finite differences of {name}", error, bound))
    twin = op.in_one_stage()
    if twin is None:
        notes.append("double backward through the whole model: not done, it is on several devices or ranks")
    else:
        distance = _distance(space, twin.products([v])[0], Hv)
        rows.append(("double backward through the whole model", distance, precision.exact))
    if precision.is_half:
        notes.append("computed in half precision: for a sharper answer check it in float32, without autocast")
    elif not precision.is_double and not all(error <= bound for _, error, bound in rows):
        notes.append("computed in float32: kinks (ReLU) and a loss of nearly 0 look like errors; check a float64 copy")
    notes.extend(f"worked round: {workaround}" for workaround in op.workarounds)
    return Report(op.name, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], notes)


def _unit(space: Space, seed: int, index: int) -> Vec:
    vec = space.random("normal", seed, index)
    return scale_(vec, 1 / max(space.norm(vec), 1e-300))


def _distance(space: Space, vec: Vec, reference: Vec) -> float:
    """The relative distance of two vectors; nan where one is not finite."""
    distance = space.norm(add_(copy(vec), reference, -1.0))
    return distance / max(space.norm(reference), 1e-300) if distance else 0.0


def _stages(op: Operator, v: Vec) -> list[tuple[str, float, Precision]]:
    """The rule of each stage, of all ranks, against finite differences of that stage; behind them the loss's."""
    # By stage, the last for the loss: is it there, error, precision.
    table = [torch.zeros(2 + len(Precision._fields), **HOST)] * (op.stages + 1)

    def note(index: int, error: float, precision: Precision) -> None:
        table[index] = torch.maximum(table[index], torch.tensor([1.0, error, *precision], **HOST))  # nan, where one is

    op.compare_stages([v], note)
    return [
        (op.stage_name(index) if index < op.stages else "loss_fn", error, Precision(*precision))
        for index, (is_there, error, *precision) in enumerate(op.space.sum_over(torch.stack(table)).tolist())
        if is_there
    ]


def _differences(op: Operator, v: Vec, Hv: Vec, precision: Precision) -> float:
    """H v against central differences of the gradient, along v."""
    space = op.space
    longest = precision.step(space.norm(op.point()), 1.0)
    return error_of(Hv, lambda step: op.gradient_at(scale_(copy(v), step)), longest, precision, space.norm)
