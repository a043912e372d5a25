"""A check of a stage's rule against finite differences of what the stage computes.

    along (h', v, l'):   [G(h + e h', w + e v, l + e l') - G(h - e h', w - e v, l - e l')] / 2e   against the rule's
    J^T A J:             [y(h + e h', w + e v) - y(h - e h', w - e v)] / 2e                       against y'

G is the stage's plain first-order backward. Central differences, the longest step the cube root of the dtype's
precision, relative to the sizes of point and direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.known_bad import refuse_nodes
from pipeline.curvature.products.task import Task
from pipeline.data.pytrees import Bundle, Grads, Tree
from pipeline.data.tangents import Inbox
from pipeline.stage.layers import StageLayers
from pipeline.stage.stage_rule import ProductGraph, StageRule, gradients_of

At: TypeAlias = Callable[[ProductGraph, Sequence[Tensor], float], Sequence[Tensor | None]]
LIMITS = {torch.float64: 1e-4}
LOOSE = 2e-2  # float32 and less: what is wrong is wrong by more


class RuleCheck:
    """The check of the stages of one product: of those with an autograd.Function of the user's, or of all.

    Args:
        task: of the product.
        compares: whether stages that were confirmed earlier are checked again.
        chunks: the number of chunks.
    """

    def __init__(self, task: Task, compares: bool, chunks: int) -> None:
        self._task, self._compares, self._chunks = task, compares, chunks
        self._doubtful: dict[int, int] = {}  # stages that must be checked, and for which chunk

    def inspect(self, layers: StageLayers, chunk: int, graph: ProductGraph) -> bool:
        """Look at a chunk's graph, and note the first chunk of a stage that must be checked.

        Returns:
            Whether the stage has an autograd.Function of the user's.

        Raises:
            ValueError: an operation has a wrong second derivative, or looks at other rows.
        """
        is_doubtful = refuse_nodes(layers.name, graph.roots, self._chunks)
        is_confirmed = (self._task.rule, layers.index) in self._task.confirmed.rules
        if is_doubtful and self._task.verify and (self._compares or not is_confirmed):
            self._doubtful.setdefault(layers.index, chunk)
        return is_doubtful

    def is_asked(self, stage: int, chunk: int) -> bool:
        """Whether this chunk of a stage is compared."""
        compared = 0 if self._task.on_result is not None else self._doubtful.get(stage)
        return chunk == compared and self._task.number > 0

    def confirm(self, stage: StageRule, chunk: int, inbox: Inbox, at: At, derivative: Sequence[Tensor | None]) -> None:
        """Compare a derivative with finite differences if `is_asked`. The arguments are those of `error_along`."""
        if not self.is_asked(stage.layers.index, chunk) or not derivative:  # nothing depends on a parameter
            return
        error, most = error_along(stage, chunk, inbox, at, derivative)
        if self._task.on_result is not None:
            self._task.on_result(stage.layers.index, stage.layers.name, error, most)
        elif not error <= most:
            raise ValueError(
                f"{stage.layers.name} has an autograd.Function of its own, and its second derivative differs from "
                f"finite differences by {error:.1e} of its size (at most {most:.0e} is rounding). Its backward forgets "
                "what it depends on (a tensor kept on ctx instead of save_for_backward), or is not the derivative of "
                "its forward (a straight-through estimator). Write it with differentiable operations; verify=False "
                "takes what autograd says."
            )
        else:
            self._task.confirmed.rules.add((self._task.rule, stage.layers.index))


def limit(dtype: torch.dtype) -> float:
    """The largest relative error that rounding and the step leave."""
    return LIMITS.get(dtype, LOOSE)


def error_along(
    stage: StageRule, chunk: int, inbox: Inbox, at: At, derivative: Sequence[Tensor | None]
) -> tuple[float, float]:
    """The distance of a derivative along direction 0 from finite differences.

    Args:
        stage: the stage, within its `stand_in`.
        chunk: a chunk that has run.
        inbox: the values that it read.
        at: (graph, targets, step) -> the function that was differentiated, at `step` along the direction.
        derivative: along the direction.

    Returns:
        The relative error, less what rounding explains; and its limit.
    """
    tangents = inbox.tangents[0] if inbox.tangents else []
    aliases, parts = stage.parameters.aliases, stage.parameters.parts
    trained = [(owner, alias, parts(owner, alias)[0]) for owner, alias in aliases.trained]
    owners = [(owner, alias, part) for owner, alias, part in trained if part is not None]  # all are
    live = [tensor for tensor, needs in zip(inbox.values.tensors, inbox.needs, strict=True) if needs]
    size = _norm([*live, *[alias for _, alias, _ in owners]])
    along = _norm([*tangents, *[part for _, _, part in owners]])
    dtype = owners[0][1].dtype if owners else live[0].dtype if live else torch.float64
    if along == 0.0 or stage.parameters.captured:  # a captured parameter cannot be moved
        return 0.0, limit(dtype)

    def values_at(step: float) -> list[Tensor | None]:
        views = {id(owner): (alias + step * part).detach().requires_grad_() for owner, alias, part in owners}
        moved = _moved(inbox, tangents, step)
        with stage.forwards.as_at_forward(chunk), aliases.stand_back(views):
            graph = stage.computed(chunk, moved)
            each = at(graph, [*graph.leaves, *views.values()], step)
        return [None if value is None else value.detach() for value in each]

    def error_at(step: float) -> tuple[float, float]:
        return _compared(values_at(step), values_at(-step), derivative, step)

    return least(error_at, torch.finfo(dtype).eps ** (1 / 3) * max(size, 1e-3) / along, limit(dtype)), limit(dtype)


def least(error_at: Callable[[float], tuple[float, float]], step: float, enough: float) -> float:
    """The smallest error at some steps. A step may lead over a kink (that of ReLU), which a shorter one does not reach.

    A wrong derivative is wrong at every step.

    Args:
        error_at: step -> the relative error, and the part of it that rounding alone could make.
        step: the longest step.
        enough: the error at which the search ends.
    """
    smallest = float("inf")
    for factor in (1.0, 0.1, 0.01):
        error, rounding = error_at(step * factor)
        if rounding > enough and smallest < float("inf"):  # at shorter steps rounding hides everything
            break
        smallest = min(smallest, max(error - rounding, 0.0))
        if smallest <= enough:
            break
    return smallest


def _compared(
    ahead: Sequence[Tensor | None], behind: Sequence[Tensor | None], derivative: Sequence[Tensor | None], step: float
) -> tuple[float, float]:
    precision = 0.0
    difference, ours, theirs, values = 0.0, 0.0, 0.0, 0.0
    for one, other, part in zip(ahead, behind, derivative, strict=True):
        if one is None or other is None:
            continue
        expected = (one.double() - other.double()) / (2 * step)
        own = torch.zeros_like(expected) if part is None else part.double()
        precision = max(precision, torch.finfo(one.dtype).eps)
        difference += float((expected - own).square().sum())
        ours, theirs = ours + float(own.square().sum()), theirs + float(expected.square().sum())
        values += float(one.double().square().sum())
    rounding = 3 * precision * values**0.5 / step
    size = max(ours**0.5, theirs**0.5, rounding, 1e-300)
    return float(difference**0.5 / size), float(rounding / size)


def _moved(inbox: Inbox, tangents: Sequence[Tensor], step: float) -> Inbox:
    """The values that were read, further along their tangents."""
    left = iter(tangents)
    pairs = zip(inbox.values.tensors, inbox.needs, strict=True)
    tensors = [tensor + step * next(left) if needs else tensor for tensor, needs in pairs]
    parts = inbox.values.split(tensors)
    trees = tuple([Tree(tuple(part), tree.skeleton) for tree, part in zip(inbox.values.trees, parts, strict=True)])
    return inbox._replace(values=Bundle.of(trees))


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(float(tensor.detach().double().square().sum()) for tensor in tensors) ** 0.5)


def of_gradient(first: Grads, second: Grads) -> At:
    """The stage's backward of l + step l', for `error_along`."""

    def at(graph: ProductGraph, targets: Sequence[Tensor], step: float) -> Sequence[Tensor | None]:
        pairs = [
            (root, one if other is None else one + step * other)
            for root, one, other in zip(graph.roots, first, second, strict=True)
            if one is not None
        ]
        return gradients_of([root for root, _ in pairs], targets, [grad for _, grad in pairs], False)

    return at


def of_output(graph: ProductGraph, targets: Sequence[Tensor], step: float) -> Sequence[Tensor | None]:
    """The values that the stage makes, for `error_along`."""
    return graph.roots
