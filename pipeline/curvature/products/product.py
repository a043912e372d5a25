"""One mini-batch's part of a product: a step through the schedule whose messages carry tangents.

    F(s, i)  takes (h, h'[k])      StageRule.forward   puts (y, y'[k])          last stage: waits for B
    B(s, i)  takes (l, l'[k])      StageRule.pull_*    puts those of its input; adds H v[k] and the gradient to sums
    I = B, W = nothing: of a backward cut in two, the first part does all

It is a table of work for an `Execution`, as a step is. What B does is different for each matrix, see matrices.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from pipeline.common.graph import StrayGradientGuard
from pipeline.curvature.known_bad import explained
from pipeline.curvature.products.loss_end import LossProduct
from pipeline.curvature.products.messages import Back, Inbox, groups_of
from pipeline.curvature.products.stage_check import RuleCheck, of_output
from pipeline.curvature.products.stage_parameters import StageParameters
from pipeline.curvature.products.stage_rule import ProductGraph, ProductRecord, StageRule
from pipeline.curvature.products.sums import Sums
from pipeline.curvature.products.task import Task
from pipeline.data.pytrees import Activations, Grads
from pipeline.execution.communicator import Verdict
from pipeline.execution.execution import Execution, Work
from pipeline.recompute.randomness import Seeder
from pipeline.recompute.snapshot import ForwardSnapshot
from pipeline.stage.layers import StageLayers
from pipeline.stage.parameters import Aliases
from scheduler import Kind


class ProductCall(ABC):
    """One mini-batch.

    Args:
        execution: runs it.
        task: the matrix and the directions.
        loss_end: the loss behind the last stage.
        sums: the products are added to them.
    """

    def __init__(self, execution: Execution, task: Task, loss_end: LossProduct, sums: Sums) -> None:
        self.loss_end = loss_end
        self._execution, self._task = execution, task
        self._rule_check = RuleCheck(task, execution.setup.compares, execution.batch.chunks)
        self._run = {index: self._stage(layers, sums) for index, layers in execution.layers.items()}
        self._reached = False  # the loss has come from a parameter

    def _stage(self, layers: StageLayers, sums: Sums) -> StageRule:
        execution, task = self._execution, self._task
        setup, index = execution.setup, layers.index
        device, bring = setup.layout.places[index].device, execution.bring(index)
        if task.shift is not None:
            bring = partial(_shifted, bring, task.shift, device)
        aliases = Aliases(
            layers.modules, layers.numbered, layers.name, StrayGradientGuard(layers.name), setup.compares, bring, True,
            task.wanted,
        )
        snapshot = ForwardSnapshot(
            layers.modules, execution.ambient, layers.name, index, setup.known, setup.compares
        )
        along, add = partial(_along_at, task.along, device), partial(sums.add, index)
        parameters = StageParameters(aliases, task.wanted, task.number, along, add)
        seeder = Seeder(setup.seed, [device], execution.generators)
        is_cut = execution.batch.chunks > 1
        return StageRule(layers, parameters, snapshot, seeder, self._rule_check.inspect, is_cut)

    # --------------------------------------------------------------------------------------------------------- run

    def run(self) -> Verdict:
        """Run all actions, and agree on the loss with all processes."""
        execution = self._execution
        draws = not all([layers.is_quiet for layers in execution.layers.values()])
        try:
            with execution.generators:
                execution.feed(grad=False)
                execution.run(0, self._work(), draws)
                self._check_stages()
                if execution.has_last:
                    self.loss_end.check()
        finally:
            for stage in self._run.values():
                stage.release()
        loss = self.loss_end.loss.value if execution.has_last else None
        return execution.communicator.agree(Verdict(loss, None, self._reached))

    @property
    def captures(self) -> bool:
        """Whether a layer has captured a parameter of another module, whose values `Task.shift` cannot change."""
        return any(stage.parameters.captured for stage in self._run.values())

    @property
    def weights(self) -> tuple[float, float] | None:
        """The part of this mini-batch in the divisor of the sums, and of its loss in that of all. None: not here."""
        return self.loss_end.weights if self._execution.has_last else None

    def _check_stages(self) -> None:
        """Raise if a stage did something that makes numbers depend on the order of the chunks."""
        execution, stages = self._execution, self._run.values()
        for stage in stages:
            stage.parameters.aliases.check_versions(execution.batch.chunks - 1)
            stage.parameters.aliases.check_memory()
            captured = stage.parameters.captured.values()
            execution.communicator.topology.refuse_external(captured, stage.layers.name, stage.layers.index)
        execution.check_snapshots({stage.layers.index: stage.snapshot for stage in stages})
        for stage in stages:
            stage.snapshot.note()

    # -------------------------------------------------------------------------------------------------------- work

    def _work(self) -> Work:
        """The work of each kind of action; errors of torch that second derivatives explain are explained."""
        table = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._weights}
        return {kind: partial(self._explaining, work) for kind, work in table.items()}

    def _explaining(self, work: Callable[[int, int], None], stage: int, chunk: int) -> None:
        try:
            work(stage, chunk)
        except BaseException as error:
            said = explained(error, self._run[stage].layers.name)
            if said is error:
                raise
            raise said from error

    def _forward(self, stage: int, chunk: int) -> None:
        execution, run = self._execution, self._run[stage]
        messages = execution.take(stage, chunk)
        inbox = Inbox.of(messages, self._task.number)
        if stage == execution.last:
            run.wait(chunk, inbox)
            return
        made = run.forward(chunk, inbox, (stage, chunk) in execution.setup.recompute)
        if self._rule_check.is_asked(stage, chunk):
            tangents = Inbox.of(made, self._task.number).tangents[0]
            with run.parameters.aliases.stand_in():  # for a Hessian once more at B: then of the gradient
                self._rule_check.confirm(run, chunk, inbox, of_output, tangents)
        if run.writes_input:
            execution.check_alone(stage, chunk, messages)
        execution.mailbox.put(stage, chunk, made)

    def _backward(self, stage: int, chunk: int) -> None:
        execution, run = self._execution, self._run[stage]
        record = run.taken(chunk)
        if stage == execution.last:
            assert record is not None  # wait
            grads = self._last_backward(run, chunk, record.inbox)
        else:
            given = execution.take_grads(stage, chunk)
            grads = [()] * (1 + run.layers.pops)
            if record is not None and any([grad is not None for each in given for grad in each]):
                grads = self._middle_backward(run, chunk, record, given)
        execution.mailbox.put_grads(stage, chunk, grads)

    def _weights(self, stage: int, chunk: int) -> None:
        pass

    def _last_backward(self, run: StageRule, chunk: int, inbox: Inbox) -> list[Grads]:
        with run.parameters.aliases.stand_in():
            graph = run.run(chunk, inbox)
            if run.writes_input:
                self._execution.check_alone(
                    run.layers.index, chunk, [Activations(inbox.values.trees[0], (), inbox.memory)]
                )
            return self.at_loss(run, chunk, graph, inbox).messages(inbox)

    def _middle_backward(
        self, run: StageRule, chunk: int, record: ProductRecord, given: Sequence[Grads]
    ) -> list[Grads]:
        again = record.graph is None
        with run.snapshot.as_at_forward(chunk) if again else nullcontext(), run.parameters.aliases.stand_in():
            graph = run.again(chunk, record)
            groups = groups_of(given, record.lives, self._task.number + self.sends_gradient)
            return self.pull(run, chunk, graph, record.inbox, groups).messages(record.inbox)

    # ------------------------------------------------------------------------------------------- what a matrix says

    @property
    def sends_gradient(self) -> bool:
        """Whether the loss's gradient goes back with the products."""
        return self._task.gradient

    @abstractmethod
    def at_loss(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox) -> Back:
        """B of the last stage: from the loss on its outputs to what goes back."""

    @abstractmethod
    def pull(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox, groups: list[Grads]) -> Back:
        """B of another stage. `groups`: what came back, for each root: l where it is sent, then each direction's."""


def _shifted(
    bring: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    shift: Callable[[Tensor, torch.device], Tensor],
    device: torch.device,
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """The values of parameters somewhere else, in memory of their own."""
    with torch.inference_mode(False), torch.no_grad():
        pairs = zip(parameters, bring(parameters), strict=True)
        return [here.detach() + shift(parameter, device).to(here.dtype) for parameter, here in pairs]


def _along_at(
    along: Callable[[Tensor, torch.device], list[Tensor]], device: torch.device, owner: Tensor
) -> list[Tensor]:
    return along(owner, device)
