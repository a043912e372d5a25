"""The backward of one layer, whole or in two halves as a stage runs it (partition/halves.py), without autocast.

    outputs, their gradients ──► B
    outputs, their gradients ──► I ──parts that wait──► W
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partition.graph import nodes_of
from partition.halves import LateGrads, add_late_gradients, ends_without, survey, waiting
from partition.precision import without_autocast


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor], targets: Sequence[Any]) -> None:
    """B, to `targets` alone: a closure may reach tensors of the caller.

    Args:
        outputs: that need a gradient.
        gradients: of these.
        targets: tensors, or edges of the graph.
    """
    if outputs and targets:
        with without_autocast():
            torch.autograd.backward(outputs, gradients, inputs=targets)


def first_half(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], targets: Sequence[Tensor], parameters: Collection[Tensor],
    on_wait: Callable[[Tensor], None] = lambda gradient: None,
) -> list[LateGrads]:  # fmt: skip
    """I, and what it leaves to W.

    Args:
        outputs, gradients, targets: as of `backward`.
        parameters: those whose gradients can wait.
        on_wait: called with each gradient that waits from now on.
    """
    weights = {id(parameter) for parameter in parameters}
    sites = survey(outputs, nodes_of(outputs), lambda leaf: id(leaf) in weights)
    with waiting(sites) as parts, ExitStack() as hooks:
        for site in sites:
            hooks.callback(site.node.register_prehook(partial(_tell, on_wait)).remove)
        backward(outputs, gradients, ends_without(sites, targets))
    return parts


def _tell(on_wait: Callable[[Tensor], None], gradients: Sequence[Tensor | None]) -> None:
    if gradients[0] is not None:
        on_wait(gradients[0])


def second_half(parts: list[LateGrads]) -> None:
    """W; `parts` is empty afterwards."""
    with without_autocast():
        add_late_gradients(parts, "the layer", torch.autograd.backward)
