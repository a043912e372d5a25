"""The sums of the products of all stages and chunks, by parameter.

    stage s, parameter p, product k  --add-->  the entries of p in vector k
    p that several stages read       --parts by stage-->  join: added in the order of the stages, over ranks too
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from torch import Tensor

from pipeline.curvature.products.sharded import ParameterSpace
from pipeline.curvature.products.task import ProductTask
from pipeline.execution.communicator import Communicator, StageGrad


class Sums:
    """The vectors that a product makes.

    Args:
        space: of the vectors.
        task: of the product.
        shared: the ids of parameters that several stages read.
    """

    def __init__(self, space: ParameterSpace, task: ProductTask, shared: Collection[int]) -> None:
        self.vectors = [space.zeros() for _ in range(task.number + task.gradient)]
        self._slots, self._shared = task.slots, shared
        self._parts: list[dict[tuple[int, int], StageGrad]] = [{} for _ in self.vectors]
        self._views: dict[tuple[int, int], Tensor] = {}  # by parameter and vector
        self._lock = threading.Lock()  # a parameter may be captured by a stage that it is not registered in

    def add(self, stage: int, owner: Tensor, products: Sequence[Tensor | None], gradient: Tensor | None) -> None:
        """Add what a stage has computed for a parameter: each product's part, and the gradient's after them."""
        parts = list(products) if len(products) == len(self.vectors) else [*products, gradient]
        with self._lock:
            for number, grad in enumerate(parts):
                if grad is None:
                    continue
                if id(owner) in self._shared:
                    key = (stage, id(owner))
                    _, _, total = self._parts[number].get(key, (stage, owner, None))
                    self._parts[number][key] = (stage, owner, grad if total is None else total + grad)
                else:
                    self._write(number, owner, grad)

    def _write(self, number: int, owner: Tensor, grad: Tensor) -> None:
        view = self._views.get((id(owner), number))
        if view is None:
            view = self._views[id(owner), number] = self._slots[id(owner)].view(self.vectors[number])
        view.add_(grad if grad.device == view.device else grad.to(view.device))

    def join(self, communicator: Communicator) -> None:
        """Add up the parts of parameters that several stages read, here and on other ranks."""
        for number, parts in enumerate(self._parts):
            totals = communicator.gradients.join(sorted(parts.values(), key=lambda part: part[0]))
            for owner, whole in totals.values():
                if id(owner) in self._slots:
                    self._write(number, owner, whole)
            parts.clear()

    def divide_(self, total: float) -> None:
        """Divide all vectors."""
        for vector in self.vectors:
            for shard in vector:
                shard.div_(total)
