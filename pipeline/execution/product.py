"""The table of work of a product: a step through the schedule whose messages carry tangents.

    F(s, i)  takes (h, h'[k])      StageRule.forward   puts (y, y'[k])          last stage: waits for B
    B(s, i)  takes (l, l'[k])      `pull`              puts those of its input
    I = B, W = nothing: of a backward cut in two, the first part does all

What B does is different for each matrix (pipeline/curvature/products/matrices.py) and for the backward of gradients
(gradient_product.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from pipeline.common.twice import explained
from pipeline.data.microbatch import refuse_layouts
from pipeline.data.pytrees import Activations, Grads
from pipeline.data.tangents import Inbox, LeafGrads, grad_groups
from pipeline.execution.execution import Execution, WorkTable
from pipeline.execution.mailbox import written_until
from pipeline.stage.stage_rule import ProductGraph, ProductRecord, StageRule
from scheduler import Kind


class Product(ABC):
    """One pass of tangents through the stages.

    Args:
        execution: runs it.
        stages: those in this process, by index.
        number: of directions.
    """

    def __init__(self, execution: Execution, stages: Mapping[int, StageRule], number: int) -> None:
        self._execution = execution
        self._run = stages
        self._number = number

    def work(self) -> WorkTable:
        """The work of each kind of action; errors of torch that second derivatives explain are explained."""
        table = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._weights}
        return {kind: partial(self._explaining, work) for kind, work in table.items()}

    def _explaining(self, work: Callable[[int, int], None], stage: int, chunk: int) -> None:
        try:
            work(stage, chunk)
        except BaseException as error:
            explanation = explained(error, self._run[stage].layers.name)
            if explanation is error:
                raise
            raise explanation from error

    def _forward(self, stage: int, chunk: int) -> None:
        execution, run = self._execution, self._run[stage]
        messages = execution.take(stage, chunk)
        inbox = Inbox.of(messages, self._number)
        if stage == execution.last:
            run.wait(chunk, inbox)
            written_until(run.layers.name, messages, False)
            return
        outputs = run.forward(chunk, inbox, (stage, chunk) in execution.setup.recompute)
        self.look(run, chunk, inbox, outputs)
        if run.writes_input or messages[0].written:
            written = written_until(run.layers.name, messages, run.writes_input)
            outputs[0] = outputs[0]._replace(written=written)
        execution.mailbox.put(stage, chunk, outputs)

    def _backward(self, stage: int, chunk: int) -> None:
        execution, run = self._execution, self._run[stage]
        record = run.take_record(chunk)
        if stage == execution.last:
            assert record is not None  # wait
            grads = self._last_backward(run, chunk, record.inbox)
        else:
            output_grads = execution.take_grads(stage, chunk)
            grads = [()] * (1 + run.layers.pops)
            if record is not None and any([grad is not None for value_grads in output_grads for grad in value_grads]):
                grads = self._middle_backward(run, chunk, record, output_grads)
        execution.mailbox.put_grads(stage, chunk, grads)

    def _weights(self, stage: int, chunk: int) -> None:
        pass

    def _last_backward(self, run: StageRule, chunk: int, inbox: Inbox) -> list[Grads]:
        with run.forwards.standing():
            graph = run.run(chunk, inbox)
            if run.writes_input:
                written_until(run.layers.name, [Activations(inbox.values.trees[0], (), inbox.memory)], True)
            refuse_layouts([tensor for tensor in graph.outputs.tensors if tensor.requires_grad])
            return self.at_end(run, chunk, graph, inbox).messages(inbox)

    def _middle_backward(
        self, run: StageRule, chunk: int, record: ProductRecord, output_grads: Sequence[Grads]
    ) -> list[Grads]:
        recomputes = record.graph is None
        with run.forwards.as_at_forward(chunk) if recomputes else nullcontext(), run.forwards.standing():
            graph = run.graph_of(chunk, record)
            groups = grad_groups(output_grads, record.lives, self._number + self.sends_gradient)
            return self.pull(run, chunk, graph, record.inbox, groups).messages(record.inbox)

    # --------------------------------------------------------------------------------------------- what a matrix says

    def look(self, run: StageRule, chunk: int, inbox: Inbox, outputs: Sequence[Activations]) -> None:
        """Look at what F made, tangents among it."""

    @property
    @abstractmethod
    def sends_gradient(self) -> bool:
        """Whether a gradient goes back with the products."""

    @abstractmethod
    def at_end(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox) -> LeafGrads:
        """B of the last stage: from its outputs to what goes back."""

    @abstractmethod
    def pull(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox, groups: list[Grads]) -> LeafGrads:
        """B of another stage. `groups`: what came back, for each root: l where it is sent, then each direction's."""
