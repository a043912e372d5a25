"""One mini-batch's part of a product: an ordinary step through the schedule, whose messages carry tangents.

    F(s, i)  takes (h, h'[k])      StageRule.forward   puts (y, y'[k])          last stage: waits for B
    B(s, i)  takes (l, l'[k])      StageRule.pull_*    puts those of its input; adds H v[k] and the gradient to sums
    I = B, W = nothing: of a backward cut in two, the first part does all

The engine, the drivers, the mailboxes and what happens over ranks are those of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.graph import StrayGradientGuard
from pipeline.common.interrupts import deliver
from pipeline.common.places import Place
from pipeline.common.torch_modes import Ambient, weights_cast_anew, without_autocast
from pipeline.curvature.known_bad import explained
from pipeline.curvature.products.loss_end import LossProduct
from pipeline.curvature.products.rules import Rule, row_by_row
from pipeline.curvature.products.stage_check import At, error_along, of_gradient, of_output
from pipeline.curvature.products.stage_rule import Back, Inbox, ProductGraph, ProductRecord, StageRule, gradients_of
from pipeline.curvature.products.sums import Sums
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Grads, Tree, sum_grads
from pipeline.data.values import CALLER
from pipeline.execution.communicator import Verdict
from pipeline.execution.drivers import Driver
from pipeline.execution.mailbox import check_alone
from pipeline.execution.placement import ParameterPlacement
from pipeline.execution.setup import Setup
from pipeline.recompute.randomness import KeptGenerators, Seeder
from pipeline.recompute.snapshot import ForwardSnapshot, check_shared, generators_elsewhere
from pipeline.stage.layers import StageLayers
from pipeline.stage.parameters import Aliases
from pipeline.transports.local import Local
from scheduler import Action, Kind

Inspect: TypeAlias = Callable[[StageRule, int, ProductGraph], None]
Told: TypeAlias = Callable[[int, str, float, float], None]


class Task(NamedTuple):
    """What a product wants.

    Attributes:
        rule: which matrix.
        number: how many directions there are.
        along: (parameter, device) -> its part of each direction, there.
        gradient: whether the gradient is wanted too.
        wanted: the parameters of the space in this process, by id.
        inspect: may refuse what the first chunk's graph of a stage shows; whether numbers must show that it is right.
        confirmed: the stages that numbers have confirmed, of which rule; this product adds to it.
        told: gets (index and name of a stage, relative error of its rule against finite differences, limit), of chunk 0
            of each stage. None: only stages that must be checked are, and one that is wrong is an error.
        shift: where parameters are looked at: (parameter, device) -> what to add to its values. None: nothing.
    """

    rule: Rule
    number: int
    along: Callable[[Tensor, torch.device], list[Tensor]]
    gradient: bool
    wanted: Mapping[int, Tensor]
    inspect: Callable[[StageRule, ProductGraph, int], bool]
    confirmed: set[tuple[Rule, int]]
    told: Told | None = None
    shift: Callable[[Tensor, torch.device], Tensor] | None = None


class ProductCall:
    """One mini-batch.

    Args:
        setup: what runs, and how; its seed is that of the mini-batch.
        batch: the input, cut.
        task: what is wanted.
        new_loss: makes the loss behind the last stage, given how to carry the target and how to seed.
        sums: get what is computed for the parameters.
    """

    def __init__(
        self,
        setup: Setup,
        batch: Batch,
        task: Task,
        new_loss: Callable[[Callable[[Tensor, torch.device], Tensor], Callable[[int], None]], LossProduct],
        sums: Sums,
    ) -> None:
        self._setup, self._batch, self._task, self._sums = setup, batch, task, sums
        self._communicator = setup.communicator
        self._doubtful: dict[int, int] = {}  # stages whose rule numbers must confirm, and for which chunk
        self._reached = False  # the loss has come from a parameter
        self._devices = [place.device for index, place in enumerate(setup.places) if setup.communicator.has(index)]
        self._generators = KeptGenerators(self._devices)
        self._ambient = Ambient.capture(dict.fromkeys(["cpu", *(device.type for device in self._devices)]))
        lane_of = setup.plan.schedule.placement.lane_of
        self._lane_of = lane_of
        self._driver = Driver(setup.places, setup.stages, lane_of, setup.workers)
        homes = ParameterPlacement(setup.stages, setup.places, setup.transport)
        doubt = partial(_inspected, task, setup.compares, batch.chunks, self._doubtful)  # holds nothing of the call
        firsts = accumulate((len(layers) for layers in setup.stages), initial=0)
        self._run = {
            index: self._stage(index, first, place, homes, doubt)
            for index, (first, place) in enumerate(zip(firsts, setup.places, strict=False))
            if setup.communicator.has(index)
        }
        self._last = len(setup.stages) - 1
        layers = sum(len(layers) for layers in setup.stages)
        seeder = Seeder(setup.seed, self._devices, self._generators)
        self.loss = new_loss(partial(_carried, setup.transport), lambda chunk: seeder.seed(chunk, layers))
        self._mailbox = setup.communicator.mailbox(setup.values, dict(enumerate(setup.places)), setup.transport)

    def _stage(self, index: int, first: int, place: Place, homes: ParameterPlacement, doubt: Inspect) -> StageRule:
        setup, task = self._setup, self._task
        layers = StageLayers(index, first, setup.stages[index], setup.values)
        bring = partial(homes.bring, place)
        if task.shift is not None:
            bring = partial(_shifted, bring, task.shift, place.device)
        aliases = Aliases(
            layers.modules, layers.numbered, layers.name, StrayGradientGuard(layers.name), setup.compares, bring, True,
            task.wanted,
        )
        snapshot = ForwardSnapshot(layers.modules, self._ambient, layers.name, index, setup.known, setup.compares)
        along = partial(_along_at, task.along, place.device)
        add = partial(self._sums.add, index)
        return StageRule(
            index, layers, aliases, snapshot, Seeder(setup.seed, [place.device], self._generators), task.number,
            along, add, task.wanted, doubt, self._batch.chunks > 1
        )

    # --------------------------------------------------------------------------------------------------------- run

    def run(self) -> Verdict:
        """Run it all; the loss, on all processes."""
        try:
            with self._generators, weights_cast_anew(True):
                self._begin()
                self._drive()
                self._check()
        finally:
            for stage in self._run.values():
                stage.release()
        loss = self.loss.loss.value if self._last in self._run else None
        return self._communicator.agree(Verdict(loss, None, self._reached))

    @property
    def captures(self) -> bool:
        """Whether a stage computes with a parameter past its modules: where it is looked at, it cannot be shifted."""
        return any(stage.captured for stage in self._run.values())

    @property
    def weights(self) -> tuple[float, float] | None:
        """How much this mini-batch adds to the divisor of the sums, and its loss to that of all. None: not here."""
        return self.loss.weights if self._last in self._run else None

    def _begin(self) -> None:
        if 0 in self._run:
            for chunk in range(self._batch.chunks):
                self._mailbox.put(CALLER, chunk, [self._batch.message(chunk, False)])

    def _drive(self) -> None:
        (phase,) = self._setup.plan.phases
        draws = not all([stage.layers.is_quiet for stage in self._run.values()])
        in_turns = self._driver.has_threads and self._setup.compares
        self._communicator.begin(0)
        self._driver.run(phase, self._perform, draws, self._ambient, in_turns)
        self._communicator.end()

    def _check(self) -> None:
        """All has run: raise if something was done that makes numbers depend on the order of the chunks."""
        stages = list(self._run.values())
        for stage in stages:
            stage.aliases.check_versions(self._batch.chunks - 1)
            stage.aliases.check_memory()
            if self._batch.chunks > 1:
                stage.snapshot.buffers.check_unseen(stage.name)
            stage.snapshot.note()
            self._communicator.refuse_external(stage.captured.values(), stage.name, stage.index)
        elsewhere = generators_elsewhere(self._setup.stages, self._run)
        check_shared([(stage.name, stage.snapshot) for stage in stages], elsewhere)
        if self._last in self._run:
            with torch.enable_grad():
                self.loss.check()

    def _perform(self, action: Action) -> None:
        deliver()
        start = perf_counter()
        self._communicator.at(action)
        try:
            with torch.enable_grad():
                _WORK[action.kind](self, action.stage, action.chunk)
        except BaseException as error:
            name = self._run[action.stage].name
            said = explained(error, name)
            said.add_note(f"{name}, chunk {action.chunk}, {action}")
            if said is error:
                raise
            raise said from error
        for trace in self._setup.traces:
            trace.record(action, self._lane_of[action.stage], start)

    # ----------------------------------------------------------------------------------------------------- actions

    def _forward(self, stage: int, chunk: int) -> None:
        run = self._run[stage]
        messages = self._mailbox.take(stage, chunk)
        inbox = Inbox.of(messages, self._task.number)
        if stage == self._last:
            run.wait(chunk, inbox)
            return
        made = run.forward(chunk, inbox, (stage, chunk) in self._setup.recompute)
        if self._is_asked(run, chunk):
            tangents = Inbox.of(made, self._task.number).tangents[0]
            with run.aliases.stand_in():  # for a Hessian once more at B: then of the gradient
                self._confirm(run, chunk, inbox, of_output, tangents)
        self._check_alone(run, messages, chunk)
        self._mailbox.put(stage, chunk, made)

    def _check_alone(self, run: StageRule, messages: Sequence[Activations], chunk: int) -> None:
        if run.writes_input:
            check_alone(run.index, run.name, messages, self._mailbox.under_way(chunk))

    def _backward(self, stage: int, chunk: int) -> None:
        run = self._run[stage]
        record = run.taken(chunk)
        if stage == self._last:
            assert record is not None  # wait
            back = self._last_backward(run, chunk, record.inbox)
        else:
            given = [sum_grads(readers) for readers in self._mailbox.take_grads(stage, chunk)]
            back = None
            if record is not None and any([grad is not None for each in given for grad in each]):
                back = self._middle_backward(run, chunk, record, given)
        self._mailbox.put_grads(stage, chunk, back or [()] * (1 + run.layers.pops))

    def _last_backward(self, run: StageRule, chunk: int, inbox: Inbox) -> list[Grads]:
        with run.aliases.stand_in():
            graph = run.run(chunk, inbox)
            self._check_alone(run, [Activations(inbox.values.trees[0], (), inbox.memory)], chunk)
            return _as_messages(inbox, self._at_loss(run, chunk, graph, inbox))

    def _middle_backward(
        self, run: StageRule, chunk: int, record: ProductRecord, given: Sequence[Grads]
    ) -> list[Grads]:
        again = record.graph is None
        with run.snapshot.as_at_forward(chunk) if again else nullcontext(), run.aliases.stand_in():
            graph = run.again(chunk, record)
            groups = self._groups(given, record.lives)
            if self._task.rule is Rule.HESSIAN:
                back = run.pull_second(graph, record.inbox.tangents, groups[0], groups[1:], self._task.gradient)
                if self._is_asked(run, chunk):
                    self._confirm(run, chunk, record.inbox, of_gradient(groups[0], groups[1]), back.found)
            else:
                first = groups.pop(0) if self._task.gradient else None
                back = run.pull_first(graph, groups, first)
        return _as_messages(record.inbox, back)

    def _groups(self, given: Sequence[Grads], lives: Sequence[int]) -> list[Grads]:
        """What readers send back of what a stage made, as `_as_messages` put it: for each group that of all roots."""
        filled = [each or (None,) * (live * self._heads) for each, live in zip(given, lives, strict=True)]
        return [
            tuple([
                grad
                for each, live in zip(filled, lives, strict=True)
                for grad in each[group * live : (group + 1) * live]
            ])
            for group in range(self._heads)
        ]

    @property
    def _heads(self) -> int:
        """How many gradients each tensor gets: l and l'[k]; or u[k], and l where the gradient is wanted."""
        return self._task.number + (self._task.gradient or self._task.rule is Rule.HESSIAN)

    # ------------------------------------------------------------------------------------------------ the last stage

    def _at_loss(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox) -> Back:
        (tree,) = graph.made.trees
        nothing: Grads = (None,) * len(graph.leaves)
        if self._task.rule is Rule.HESSIAN:
            # Through views, so that the gradient at an output from which another is made is its own part.
            ends = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tree.tensors]
            loss, begin = self.loss(chunk, tree, ends)
            if not loss.requires_grad:
                return Back(nothing, [nothing] * self._task.number)
            self._reached = True
            beside = [end for end in ends if end.requires_grad] if self.loss.compares else []
            targets = [*run.targets(graph), *beside]
            begin.requires_grad_(self._task.number > 0)
            with run.hooks_asleep():
                grads = gradients_of([loss], targets, [begin], self._task.number > 0)
            own = len(targets) - len(beside)
            self.loss.note(chunk, tree, tuple([None if grad is None else grad.detach() for grad in grads[own:]]))
            back = run.differentiated(graph, inbox.tangents, grads[:own], (), self._task.gradient)
            if self._is_asked(run, chunk):
                self._confirm(run, chunk, inbox, partial(self._gradient_at, chunk), back.found)
            return back
        return self._at_loss_first(run, chunk, graph, inbox, tree)

    def _at_loss_first(
        self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox, tree: Tree
    ) -> Back:
        """J^T A J: the output's tangents, then A times them by the loss alone."""
        cut = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
        leaves = [leaf for leaf in cut if leaf.requires_grad]
        loss, begin = self.loss(chunk, tree, cut)
        if not loss.requires_grad:
            nothing: Grads = (None,) * len(graph.leaves)
            return Back(nothing if self._task.gradient else None, [nothing] * self._task.number)
        self._reached = True
        is_fisher = self._task.rule is Rule.FISHER
        begin.requires_grad_(not is_fisher)
        grads = gradients_of([loss], leaves, [begin], not is_fisher)
        first = tuple([None if grad is None else grad.detach() for grad in grads])
        self.loss.note(chunk, tree, first)
        tangents = run.push(graph, inbox.tangents) if graph.roots else []
        if self._is_asked(run, chunk):
            self._confirm(run, chunk, inbox, of_output, tangents[0])
        if is_fisher:
            per_row = self._per_row(chunk, leaves)
            if self._setup.compares and chunk == 0:
                self.loss.check_rows(chunk, tree, first, per_row)
            share = self.loss.share(per_row)
            cotangents = [tuple(row_by_row(list(first), each, share)) for each in tangents]
        else:
            cotangents = [self._bent(grads, leaves, each) for each in tangents]
        return run.pull_first(graph, cotangents, first if self._task.gradient else None)

    @staticmethod
    def _bent(grads: Grads, leaves: Sequence[Tensor], tangents: Sequence[Tensor]) -> Grads:
        """The loss's own Hessian times the output's tangents."""
        live = [grad for grad in grads if grad is not None and grad.requires_grad]
        along = [
            tangent for grad, tangent in zip(grads, tangents, strict=True) if grad is not None and grad.requires_grad
        ]
        if not live:
            return (None,) * len(leaves)
        # By symmetry the derivative of <grad, tangent> is the Hessian times the tangent.
        with without_autocast():
            return torch.autograd.grad(live, leaves, along, retain_graph=True, allow_unused=True)

    def _per_row(self, chunk: int, leaves: Sequence[Tensor]) -> int:
        """How many rows the output has for one of the input.

        Raises:
            ValueError: its tensors have different numbers of rows, or none.
        """
        rows = self._batch.rows[chunk]
        found = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
        if len(found) != 1 or min(found) % rows or min(found) == 0:
            shapes = [list(leaf.shape) for leaf in leaves]
            raise ValueError(
                f"the output has shapes {shapes} for {rows} rows of input. The empirical Fisher is a sum over the rows "
                "of the output: return tensors whose dim 0 counts them."
            )
        return found.pop() // rows

    def _weights(self, stage: int, chunk: int) -> None:
        pass

    # --------------------------------------------------------------------------------------------------- confirmation

    def _is_asked(self, run: StageRule, chunk: int) -> bool:
        """Whether numbers must show that the rule of this stage is right."""
        asked = 0 if self._task.told is not None else self._doubtful.get(run.index)
        return chunk == asked and self._task.number > 0

    def _confirm(self, run: StageRule, chunk: int, inbox: Inbox, at: At, found: Sequence[Tensor | None]) -> None:
        if not found:  # nothing depends on a parameter
            return
        error, most = error_along(run, chunk, inbox, at, found)
        if self._task.told is not None:
            self._task.told(run.index, run.name, error, most)
        elif not error <= most:
            raise ValueError(
                f"{run.name} has an autograd.Function of its own, and its second derivative differs from finite "
                f"differences by {error:.1e} of its size (at most {most:.0e} is rounding). Its backward forgets what "
                "it depends on (a tensor kept on ctx instead of save_for_backward), or is not the derivative of its "
                "forward (a straight-through estimator). Write it with differentiable operations; verify=False takes "
                "what autograd says."
            )
        else:
            self._task.confirmed.add((self._task.rule, run.index))

    def _gradient_at(
        self, chunk: int, graph: ProductGraph, targets: Sequence[Tensor], step: float
    ) -> Sequence[Tensor | None]:
        """The last stage's gradient of the loss, for `error_along`."""
        (tree,) = graph.made.trees
        loss, begin = self.loss.aside(chunk, tree, tree.tensors)
        return gradients_of([loss], targets, [begin], False)


_WORK = {
    Kind.F: ProductCall._forward,
    Kind.B: ProductCall._backward,
    Kind.I: ProductCall._backward,
    Kind.W: ProductCall._weights,
}


def _as_messages(inbox: Inbox, back: Back) -> list[Grads]:
    """From groups over all leaves to what goes back for each value that was read."""
    groups = back.products if back.gradient is None else [back.gradient, *back.products]
    found, first = [], 0
    for needs in inbox.values.split(inbox.needs):
        live = sum(needs)
        found.append(tuple([grad for group in groups for grad in group[first : first + live]]))
        first += live
    return found


def _inspected(
    task: Task, compares: bool, chunks: int, doubtful: dict[int, int], stage: StageRule, chunk: int, graph: ProductGraph
) -> None:
    """Look at a chunk's graph; note the first chunk of a stage that numbers must confirm."""
    must = task.inspect(stage, graph, chunks)
    if must and (compares or (task.rule, stage.index) not in task.confirmed):
        doubtful.setdefault(stage.index, chunk)


def _carried(transport: Local, tensor: Tensor, device: torch.device) -> Tensor:
    return transport.carry(tensor, Place(tensor.device), Place(device))


def _shifted(
    bring: Callable[[Tensor], Tensor],
    shift: Callable[[Tensor, torch.device], Tensor],
    device: torch.device,
    parameter: Tensor,
) -> Tensor:
    """A parameter's values somewhere else, in memory of their own."""
    with torch.inference_mode(False), torch.no_grad():
        here = bring(parameter).detach()
        return here + shift(parameter, device).to(here.dtype)


def _along_at(
    along: Callable[[Tensor, torch.device], list[Tensor]], device: torch.device, owner: Tensor
) -> list[Tensor]:
    return along(owner, device)
