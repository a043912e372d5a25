"""The records that a stage keeps of a chunk between its F and its B.

    kept          ChunkGraph: StageInputs (where gradients come out) and OutputEdges (where they come in), with
                  autograd's graph between them
    recomputed    the input; R makes the ChunkGraph
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeline.common.graph import edge
from pipeline.data.pytrees import Bundle
from pipeline.stage.inputs import StageInputs


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
        sizes = tuple([len(tree.tensors) for tree in outputs.trees])
        edges = [(tensor if whole else edge(tensor)) if tensor.requires_grad else None for tensor in outputs.tensors]
        return cls(edges, sizes, outputs if whole else None)


class ChunkGraph(NamedTuple):
    """The graph of one chunk.

    Attributes:
        inputs: where its gradients come out.
        edges: where they come in.
        nodes: if the backward is split: all of it, for I to find the uses of weights whose gradients can wait.
    """

    inputs: StageInputs
    edges: OutputEdges
    nodes: Sequence[Any]


class ChunkRecord(NamedTuple):
    """The record of one chunk between F and B: its graph, or what R needs to make it.

    Attributes:
        graph: None: the chunk is recomputed.
        read: what it read.
        needs_grad: of which tensors of it a gradient is wanted.
        versions: of these tensors, at F.
        path: in validating calls, that of its forward, which R must take too, see `graph.path_of`.
    """

    graph: ChunkGraph | None
    read: Bundle = Bundle((), ())
    needs_grad: Sequence[bool] = ()
    versions: tuple[int, ...] = ()
    path: Sequence[tuple[str, str]] = ()
