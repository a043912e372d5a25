"""The task of a product: the matrix, the directions, and what is wanted besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.products.rules import Rule

Told: TypeAlias = Callable[[int, str, float, float], None]


class Task(NamedTuple):
    """The task of a product.

    Attributes:
        rule: which matrix.
        number: how many directions there are.
        along: (parameter, device) -> its part of each direction, there.
        gradient: whether the gradient is wanted too.
        wanted: the parameters of the space in this process, by id.
        verify: whether numbers must show that stages with an autograd.Function of the user's are right.
        confirmed: the stages that numbers have confirmed, of which rule; this product adds to it.
        told: gets (index and name of a stage, relative error of its rule against finite differences, limit), of chunk 0
            of each stage. None: only stages that must be checked are, and one that is wrong is an error.
        shift: where parameters are looked at: (parameter, device) -> what to add to its values. None: nothing.
    """

    rule: Rule
    number: int
    along: Callable[[Tensor, torch.device], list[Tensor]]
    gradient: bool
    wanted: Mapping[int, Tensor]
    verify: bool
    confirmed: set[tuple[Rule, int]]
    told: Told | None = None
    shift: Callable[[Tensor, torch.device], Tensor] | None = None
