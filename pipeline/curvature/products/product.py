"""One mini-batch's part of a product with a matrix: its stages and their forwards, its loss, its checks.

It is a table of work for an `Execution` (execution/product.py), as a step is. What B does is different for each matrix,
see matrices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pipeline.common.graph import StrayGradientGuard, explore, refuse_marked
from pipeline.curvature.products.forward_mode import ForwardMode
from pipeline.curvature.products.loss_end import LossProduct
from pipeline.curvature.products.stage_check import RuleCheck, of_output
from pipeline.curvature.products.task import ProductTask
from pipeline.data.pytrees import Activations, Bundle, Tree
from pipeline.data.tangents import Inbox, LeafGrads
from pipeline.execution.communicator import Verdict
from pipeline.execution.execution import Execution
from pipeline.execution.product import Product
from pipeline.recompute.randomness import Seeder
from pipeline.recompute.snapshot import ForwardSnapshot
from pipeline.stage.layers import StageLayers
from pipeline.stage.parameters import Aliases
from pipeline.stage.stage_parameters import StageParameters
from pipeline.stage.stage_rule import Forwards, ProductGraph, StageRule


class ProductCall(Product):
    """One mini-batch.

    Args:
        execution: runs it.
        task: the directions, and the sums that the products are added to.
        loss_end: the loss behind the last stage.

    Attributes:
        name: of the matrix.
    """

    name: str

    def __init__(self, execution: Execution, task: ProductTask, loss_end: LossProduct) -> None:
        self.loss_end = loss_end
        self._task = task
        self._rule_check = RuleCheck(task, execution.setup.compares)
        stages = {index: self._stage(execution, layers) for index, layers in execution.layers.items()}
        super().__init__(execution, stages, task.number)
        self._reached = False  # the loss has come from a parameter

    def _stage(self, execution: Execution, layers: StageLayers) -> StageRule:
        task, setup, index = self._task, execution.setup, layers.index
        device = setup.layout.places[index].device
        bring = partial(task.shifted, execution.bring(index), device)
        aliases = Aliases(
            layers.modules, layers.numbered, layers.name, StrayGradientGuard(layers.name), setup.compares, bring, True,
            task.slots,
        )
        snapshot = ForwardSnapshot(
            layers.modules, execution.ambient, layers.name, index, setup.traits, setup.compares
        )
        of_vectors, add = partial(task.along, device), partial(task.add, index)
        parameters = StageParameters(aliases, task.slots, task.number, of_vectors, add)
        seeder = Seeder(setup.seed, [device], execution.generators)
        forwards = NewForwards(layers, parameters, snapshot, seeder, self._rule_check.inspect, task.mixes_rows)
        forward_mode = task.number == 1 and not execution.has_threads
        along = ForwardMode(task.checks.forward, setup.compares) if forward_mode else None
        return StageRule(layers, parameters, forwards, along)

    # --------------------------------------------------------------------------------------------------------- run

    def run(self) -> Verdict:
        """Run all actions, and agree on the loss with all processes."""
        execution = self._execution
        draws = not all([layers.is_quiet for layers in execution.layers.values()])
        try:
            with execution.generators:
                execution.feed(grad=False)
                execution.run(0, self.work(), draws)
                self._check_stages()
                if execution.has_last:
                    self.loss_end.check()
        finally:
            for stage in self._run.values():
                stage.release()
        loss, divisor = (self.loss_end.total, self.loss_end.divisor) if execution.has_last else (None, None)
        return execution.communicator.agree(Verdict(loss, divisor, self._reached))

    def _check_stages(self) -> None:
        """Raise if a stage did something that makes numbers depend on the order of the chunks."""
        execution, stages = self._execution, self._run.values()
        for stage in stages:
            stage.parameters.aliases.check_versions(execution.batch.chunks - 1)
            stage.parameters.aliases.check_memory()
            captured = stage.parameters.captured
            self._task.checks.has_captured |= bool(captured)
            execution.communicator.topology.refuse_external(captured.values(), stage.layers.name, stage.layers.index)
        snapshots = {index: stage.forwards.snapshot for index, stage in self._run.items()}
        execution.check_snapshots(snapshots)
        for snapshot in snapshots.values():
            snapshot.note()

    def look(self, run: StageRule, chunk: int, inbox: Inbox, made: Sequence[Activations]) -> None:
        if self._rule_check.is_asked(run.layers.index, chunk):
            tangents = Inbox.of(made, self._task.number).tangents[0]
            with run.forwards.standing():  # for a Hessian once more at B: then of the gradient
                self._rule_check.confirm(run, chunk, inbox, of_output, tangents)

    @property
    def sends_gradient(self) -> bool:
        """Whether the loss's gradient goes back with the products."""
        return self._task.gradient

    def _no_grads(self, graph: ProductGraph) -> LeafGrads:
        """The gradients that go back from a loss that depends on no parameter."""
        return LeafGrads([(None,) * len(graph.leaves)] * (self._task.number + self.sends_gradient))


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
