"""The records that a stage keeps of a chunk between its F and its B.

    kept          Cut (where gradients come out) and Exits (where they come in), with autograd's graph between them
    recomputed    Record with the input
    short way     Kept, or Again with the input: one tensor that came is the leaf itself
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
    """The cut before a stage: a leaf for each input (None where no gradient is wanted), and where gradients arrive."""

    leaves: tuple[Tensor | None, ...]
    arrived: list[Tensor | None]  # one for each leaf
    sizes: Sequence[int]  # how many inputs each value has that was read

    def grads(self) -> list[Grads]:
        """What arrived, for each value that was read; taken out."""
        if len(self.leaves) == len(self.sizes) == 1:  # as a rule
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
    """The end of a chunk's graph: where gradients come in. The outputs themselves, where a loss needs them.

    Edges, and not the outputs, so that a tensor that was sent to another device does not stay where it was made. The
    last stage of a step keeps its outputs: loss and stage are differentiated in one run of autograd.
    """

    edges: list[Tensor | GradientEdge | None]  # for each tensor of the outputs; None: it needs no gradient
    sizes: tuple[int, ...]  # how many tensors each output has
    outputs: Bundle | None

    @classmethod
    def of(cls, outputs: Bundle, whole: bool) -> OutputEdges:
        """Of some outputs; `whole`: keep themselves, not just their edges in the graph."""
        if len(outputs.tensors) == len(outputs.trees) == 1:  # as a rule
            (tensor,) = outputs.tensors
            if whole:
                return cls([tensor if tensor.requires_grad else None], (1,), outputs)
            return cls([edge(tensor) if tensor.requires_grad else None], (1,), None)
        sizes = tuple([len(tree.tensors) for tree in outputs.trees])
        if whole:
            return cls([tensor if tensor.requires_grad else None for tensor in outputs.tensors], sizes, outputs)
        return cls([edge(tensor) if tensor.requires_grad else None for tensor in outputs.tensors], sizes, None)


class ChunkRecord(NamedTuple):
    """What stays between F and B of one chunk. Kept: the cut and the exits. Recomputed: the input."""

    inbox: Bundle | None
    needs_grad: Sequence[bool]
    cut: StageInputs | None
    exits: OutputEdges | None
    input_versions: tuple[int, ...]
    nodes: int
    sites: Sequence[Site] = ()  # kept, and the backward is split: where gradients can wait
    constants: Sequence[tuple[str, str]] = ()  # recomputed, and compared: see `graph.constants`


class RecomputeRecord(NamedTuple):
    """What stays between F and B of one chunk that is recomputed, where one tensor came and all is known."""

    read: Tensor
    needs_grad: bool
    version: int  # of it, at F


class GraphRecord(NamedTuple):
    """What stays between F and B of one chunk that is kept, where one tensor came and all is known."""

    cut: StageInputs
    exits: OutputEdges
