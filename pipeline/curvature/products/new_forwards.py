"""The forwards of one stage that a product runs first, and looks at before it differentiates them twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from pipeline.common.graph import explore, refuse_marked
from pipeline.data.pytrees import Bundle, Tree
from pipeline.recompute.randomness import Seeder
from pipeline.recompute.snapshot import ForwardSnapshot
from pipeline.stage.layers import StageLayers
from pipeline.stage.stage_parameters import StageParameters
from pipeline.stage.stage_rule import Forwards, ProductGraph


@dataclass(eq=False)
class NewForwards(Forwards):
    """The forwards of one stage during one product.

    Attributes:
        layers: its layers.
        parameters: those that it computes with.
        snapshot: the state that its recomputations must find as it was.
        seeder: seeds its layers.
        inspect: gets a chunk and its graph before anything is computed with it, and may refuse it. Returns whether a
            layer has an autograd.Function of the user's.
        mixes_rows: whether each chunk may be computed by itself, as in a loop over them.
    """

    layers: StageLayers
    parameters: StageParameters
    snapshot: ForwardSnapshot
    seeder: Seeder
    inspect: Callable[[StageLayers, int, ProductGraph], bool]
    mixes_rows: bool
    is_doubtful: bool = False
    _is_inspected: bool = False

    def standing(self) -> AbstractContextManager[None]:
        return self.parameters.aliases.stand_in()

    def layer_inputs(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in tensors]

    def run(self, chunk: int, values: Sequence[Tree]) -> Bundle:
        outputs = self.layers.run(chunk, values, self.seeder.seed)
        self.seeder.settle()
        return outputs

    def first(self, chunk: int, compute: Callable[[], ProductGraph]) -> ProductGraph:
        if not self.mixes_rows:  # in one chunk all rows would find what the first ones do
            self.snapshot.begin_again()
        self.snapshot.before_forward(chunk, keep=True)
        graph = compute()
        self.snapshot.after_forward(chunk, True, [tensor.detach() for tensor in graph.outputs.tensors])
        self._learn(chunk, graph)
        return graph

    def _learn(self, chunk: int, graph: ProductGraph) -> None:
        """Find what the graph reaches besides the parameters of this stage's modules, and by what operations."""
        if self._is_inspected and self.layers.is_quiet:
            return
        parameters, leaf_ids = self.parameters, {id(leaf) for leaf in graph.leaves}
        if graph.roots:
            for key, leaf in explore(graph.roots).items():
                if key in leaf_ids or key in parameters.aliases or key in parameters.captured:
                    continue
                refuse_marked(leaf, self.layers.name, "part of the product")
                parameters.learn(leaf)
            self.is_doubtful = self.inspect(self.layers, chunk, graph)
        self._is_inspected = True  # now: what was refused is refused again

    def as_at_forward(self, chunk: int) -> AbstractContextManager[None]:
        return self.snapshot.as_at_forward(chunk)

    def release(self) -> None:
        """Drop the snapshot, and restore the buffers."""
        self.snapshot.roll_back()
        self.snapshot.release()
        self.parameters.aliases.release()
