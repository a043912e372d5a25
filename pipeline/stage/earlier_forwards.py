"""The forwards that a stage ran in an earlier call, computed once more for a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from partition.graph import nodes_of
from pipeline.common.twice import is_foreign
from pipeline.data.pytrees import Bundle, Tree
from pipeline.stage.stage import StageRun
from pipeline.stage.stage_rule import Forwards, ProductGraph


class EarlierForwards(Forwards):
    """The forwards of one stage during its call, with their seeds, buffers and switches.

    Args:
        stage: the stage, after all forwards.
    """

    def __init__(self, stage: StageRun) -> None:
        self.snapshot = stage.snapshot
        self._stage = stage
        self.is_doubtful = False

    def standing(self) -> AbstractContextManager[None]:
        return self._stage.standing()

    def layer_inputs(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        inputs = self._stage.layer_inputs(chunk, tensors)
        return [
            layer_input if layer_input is not tensor else _another(tensor)
            for tensor, layer_input in zip(tensors, inputs, strict=True)
        ]

    def run(self, chunk: int, values: Sequence[Tree]) -> Bundle:
        return self._stage.rerun(chunk, values)

    def first(self, chunk: int, compute: Callable[[], ProductGraph]) -> ProductGraph:
        self._stage.check_unchanged(chunk)
        graph = compute()
        self.snapshot.check_same(chunk, [tensor.detach() for tensor in graph.outputs.tensors])
        self.is_doubtful = self.is_doubtful or any(map(is_foreign, nodes_of(graph.roots)))
        return graph

    def as_at_forward(self, chunk: int) -> AbstractContextManager[None]:
        return nullcontext()  # `run` is so

    def release(self) -> None:
        pass  # the call has them


def _another(tensor: Tensor) -> Tensor:
    """The same memory in another tensor, which is no leaf where gradients go to it: as layers got it at F."""
    return tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
