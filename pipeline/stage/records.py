"""The records that a stage keeps of a chunk between its F and its B.

    kept          ChunkRecord: StageInputs (where gradients come out) and OutputEdges (where they come in), with
                  autograd's graph between them
    recomputed    ChunkRecord with the input
    fast path     GraphRecord, or RecomputeRecord with the input: the one input tensor is the leaf itself
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeline.common.graph import edge
from pipeline.data.pytrees import Bundle, Grads
from pipeline.stage.split_backward import Site


class StageInputs(NamedTuple):
    """The cut before a stage: a leaf for each input (None: it needs no gradient), and the gradients that arrive."""

    leaves: tuple[Tensor | None, ...]
    arrived: list[Tensor | None]  # one for each leaf
    sizes: Sequence[int]  # the number of inputs of each value that was read

    def grads(self) -> list[Grads]:
        """Take out the gradients that arrived, for each value that was read."""
        if len(self.leaves) == len(self.sizes) == 1:  # the usual case
            (leaf,) = self.leaves
            if leaf is None:
                return [(None,)]
            (grad,) = self.arrived
            self.arrived[0] = None
            return [(grad,)]
        found = iter(self.arrived.copy())
        self.arrived[:] = [None] * len(self.arrived)
        grads = tuple([None if leaf is None else next(found, None) for leaf in self.leaves])
        if len(self.sizes) == 1:
            return [grads]
        return [grads[end - size : end] for size, end in zip(self.sizes, accumulate(self.sizes), strict=True)]


class OutputEdges(NamedTuple):
    """The end of a chunk's graph, where gradients come in; with the outputs themselves if a loss needs them.

    Edges, and not the outputs, so that a tensor that was sent to another device does not stay where it was made. The
    last stage of a step keeps its outputs: loss and stage are differentiated in one run of autograd.
    """

    edges: list[Tensor | GradientEdge | None]  # one for each tensor of the outputs; None: it needs no gradient
    sizes: tuple[int, ...]  # the number of tensors of each output
    outputs: Bundle | None

    @classmethod
    def of(cls, outputs: Bundle, whole: bool) -> OutputEdges:
        """The edges of some outputs; `whole`: keep the outputs too."""
        if len(outputs.tensors) == len(outputs.trees) == 1:  # the usual case
            (tensor,) = outputs.tensors
            if whole:
                return cls([tensor if tensor.requires_grad else None], (1,), outputs)
            return cls([edge(tensor) if tensor.requires_grad else None], (1,), None)
        sizes = tuple([len(tree.tensors) for tree in outputs.trees])
        if whole:
            return cls([tensor if tensor.requires_grad else None for tensor in outputs.tensors], sizes, outputs)
        return cls([edge(tensor) if tensor.requires_grad else None for tensor in outputs.tensors], sizes, None)


class ChunkRecord(NamedTuple):
    """The record of one chunk between F and B. Kept: its inputs and output edges. Recomputed: its input."""

    inbox: Bundle | None
    needs_grad: Sequence[bool]
    cut: StageInputs | None
    exits: OutputEdges | None
    input_versions: tuple[int, ...]
    nodes: int
    sites: Sequence[Site] = ()  # if kept and the backward is split: uses of weights whose gradients can wait
    constants: Sequence[tuple[str, str]] = ()  # if recomputed and validated: see `graph.constants`


class RecomputeRecord(NamedTuple):
    """The record of a recomputed chunk on the fast path: one input tensor."""

    read: Tensor
    needs_grad: bool
    version: int  # of the input, at F


class GraphRecord(NamedTuple):
    """The record of a kept chunk on the fast path: one input tensor."""

    cut: StageInputs
    exits: OutputEdges
