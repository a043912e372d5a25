"""The task of a product: the matrix, the directions, and whether the gradient is wanted too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.products.rules import Rule

OnResult: TypeAlias = Callable[[int, str, float, float], None]  # (index, name of a stage, relative error, limit)


class Confirmed(NamedTuple):
    """The findings of an operator's products about the stages; each adds to them.

    Attributes:
        rules: (matrix, stage) pairs that finite differences have confirmed.
        forward: for stages whose tangents were computed in both modes, whether they were the same.
    """

    rules: set[tuple[Rule, int]]
    forward: dict[int, bool]


class Task(NamedTuple):
    """The task of a product.

    Attributes:
        rule: the matrix.
        number: the number of directions.
        along: (parameter, device) -> its part of each direction, there.
        gradient: whether the gradient is wanted too.
        wanted: the parameters of the space in this process, by id.
        verify: whether stages with an autograd.Function of the user's are compared with finite differences.
        confirmed: what earlier products have found out.
        on_result: called for chunk 0 of each stage with the error of its rule against finite differences. None: only
            stages that must be checked are, and one that is wrong is an error.
        shift: (parameter, device) -> what is added to its values for this product. None: nothing.
    """

    rule: Rule
    number: int
    along: Callable[[Tensor, torch.device], list[Tensor]]
    gradient: bool
    wanted: Mapping[int, Tensor]
    verify: bool
    confirmed: Confirmed
    on_result: OnResult | None = None
    shift: Callable[[Tensor, torch.device], Tensor] | None = None
