"""The tridiagonal matrix that Lanczos leaves of a matrix in a Krylov space.

    start / its norm = q0 --A--> alpha0 = q0'A q0,  rest = beta0 q1 --A--> alpha1,  rest = beta1 q2 --> ...

        alpha0 beta0                      its eigenvalues: nodes of Gauss's rule for the spectral measure of the start,
        beta0  alpha1 beta1               its eigenvectors' first entries, squared: the rule's weights
               beta1  alpha2 ...          (Golub and Welsch 1969; Lanczos 1950)

The last beta times an eigenvector's last entry is the residual of its Ritz vector: how far A's next eigenvalue can be.

Every new vector is made orthogonal to all before, so that no eigenvalue comes again as a ghost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_count
from pipeline.curvature.estimates.krylov import Basis, Split, is_noise, orthogonalise_
from pipeline.curvature.linear import LinearMap, blocks
from pipeline.curvature.space import HOST, Space, Vec, copy, scale_


def tridiagonals(
    A: LinearMap,
    starts: Sequence[Vec],
    steps: int,
    on_progress: Callable[[int, list[dict[str, Any]]], None] = lambda products, states: None,
    saved_states: Sequence[dict[str, Any]] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Run Lanczos from each of some vectors, all in lockstep, so that their products are asked for together.

    It holds len(starts) * steps vectors.

    Args:
        starts: of any length but 0; not changed.
        steps: products for each start. Fewer are spent once its Krylov space is invariant, at the latest after as
            many as vectors have entries.
        on_progress: told after each group of products how many it was, and the state of each start.
        saved_states: a state of the same starts, to go on from.

    Returns:
        for each start alphas [m] and betas [m], float64, on the CPU, the same on every process; m <= steps. The last
        beta is the norm of what the last step left over, 0 where the Krylov space is invariant.

    Raises:
        ValueError: a start is zero, or `steps` is not positive.
        FloatingPointError: a product is not finite.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0])).double(), torch.zeros(2, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8)
        >>> [(alphas, betas)] = tridiagonals(H, [H.space.vec({"0.weight": torch.ones(1, 2)})], 5)
        >>> alphas.round(decimals=9).tolist(), betas.round(decimals=9).tolist()
        ([5.0, 5.0], [3.0, 0.0])
    """
    check_count("steps", steps)
    lanes = [_LanczosLane(A.space, start, number) for number, start in enumerate(starts)]
    for lane, state in zip(lanes, saved_states or (), strict=bool(saved_states)):
        lane.go_on(state)
    for step in range(1, min(steps, A.space.size) + 1):
        live = [lane for lane in lanes if len(lane.alphas) == step - 1 and not lane.is_done]
        for group in blocks(live, A.block):
            images = A.products([lane.basis.row(-1) for lane in group])
            splits = orthogonalise_([lane.basis for lane in group], images, A.name)
            for lane, image, split in zip(group, images, splits, strict=True):
                lane.take(image, split, last=step == min(steps, A.space.size))
            on_progress(len(images), [lane.state() for lane in lanes])
    return [lane.coefficients() for lane in lanes]


@dataclass
class _LanczosLane:
    """One start and what has come of it."""

    space: Space
    start: Vec
    number: int
    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    scale: float = 0.0
    is_done: bool = False

    def __post_init__(self) -> None:
        self.basis = Basis(self.space)
        norm = self.space.norm(self.start)
        if not norm > 0:
            raise ValueError(f"start {self.number} has norm {norm}: Lanczos needs a vector that is not zero.")
        self.basis.append(scale_(copy(self.start), 1 / norm))

    def take(self, image: Vec, split: Split, last: bool) -> None:
        """The product of the last row, of which `image` is the rest that is orthogonal to all rows."""
        self.alphas.append(float(split.inside[-1]))
        self.scale = max(self.scale, split.whole)
        rest = 0.0 if is_noise(split.norm, self.scale, self.space) else split.norm
        self.betas.append(rest)
        self.is_done = last or not rest
        if self.is_done:
            self.basis.cut(0)
        else:
            self.basis.append(scale_(image, 1 / rest))

    def state(self) -> dict[str, Any]:
        """All that it needs to go on."""
        return {"basis": self.basis.state(), "numbers": [self.alphas, self.betas, self.scale, self.is_done]}

    def go_on(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.basis.go_on(state["basis"])
        self.alphas, self.betas, self.scale, self.is_done = state["numbers"]

    def coefficients(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.alphas, **HOST), torch.tensor(self.betas, **HOST)
