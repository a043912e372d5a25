"""One call of a Pipe: stages that exist for this call alone, and the table kind -> work over them.

    caller --x--> Mailbox --take--> StageRun.forward --put--> Mailbox ... --y--> outputs
    caller --gradients of y (or the loss)--> StageRun.backward --put_grads--> ... --> sums, gradients of x

All entry points use it: `pipe(x)` runs the first phase in `Pipe.forward` and the second in `loss.backward()`, a step
runs its only phase at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Protocol

from torch import Tensor

from partition.precision import without_autocast
from pipeline.common.errors import CheckpointError
from pipeline.common.graph import Roots, roots_of
from pipeline.common.places import Place
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Grads, Tree
from pipeline.data.values import CALLER
from pipeline.execution.communicator import Averager, Communicator, Pair
from pipeline.execution.execution import Execution, WorkTable
from pipeline.execution.final_gradients import EarlyUse, GradientFinalizer
from pipeline.execution.gradient_product import GradientProduct
from pipeline.execution.mailbox import written_until
from pipeline.execution.second_order import differentiate
from pipeline.execution.stages import stages_of
from pipeline.stage.records import OutputEdges
from pipeline.stage.stage import RootFinder, StageRun
from pipeline.transports.message import Message
from scheduler import Kind


class BackwardStart(Protocol):
    """The loss behind the last stage: called with a chunk and its output, it says where the backward begins.

    Attributes:
        sums: the gradients of leaves that the loss itself reads, with the leaf, by its id.
    """

    @property
    def sums(self) -> dict[int, Pair]: ...

    def __call__(self, chunk: int, tree: Tree) -> Roots: ...

    def forget(self) -> None:
        """Forget all chunks: they are computed anew."""


class Call:
    """The state of one call. A context: an error within abandons the call.

    Args:
        execution: runs it.
        loss_end: of a step or an evaluation. None: the caller gives the gradients of the outputs.
        keeps_outputs: whether the outputs are wanted.

    Attributes:
        stages: those in this process.
        outputs: of each chunk, where they are wanted and the last stage is here.
        is_released: whether what was kept for a backward is gone.
    """

    def __init__(self, execution: Execution, loss_end: BackwardStart | None = None, keeps_outputs: bool = True) -> None:
        setup = execution.setup
        grad = setup.grad
        self.execution = execution
        self.stages = stages_of(execution, loss_end is not None)
        self._flags = *[stage.snapshot.key for stage in self.stages], grad
        execution.generators.seeds_all = setup.compares or self._flags not in setup.traits.draws_nothing
        self.outputs: list[Activations] = []
        self._run = {stage.layers.index: stage for stage in self.stages}
        self._last = execution.last
        self._live = [grad and tensor.requires_grad for tensor in execution.batch.tree.tensors]
        self._loss_end = loss_end
        self._keeps_outputs = keeps_outputs
        self._final_sums: dict[int, list[Pair]] = {}  # by stage: sums that are final
        self._is_checked = False
        self.is_released = False

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()

    @property
    def batch(self) -> Batch:
        """The input, cut."""
        return self.execution.batch

    @property
    def communicator(self) -> Communicator:
        """Reaches the other processes."""
        return self.execution.communicator

    def once_more(self) -> Execution:
        """Abandon this call. The execution of the same call, from its beginning; the traces of this one are removed."""
        self.abandon()
        self.execution.forget()
        return Execution(replace(self.execution.setup, compares=False), self.batch)

    # ------------------------------------------------------------------------------------------------------ phases

    def run_forward(self, use: EarlyUse | None = None) -> None:
        """Run the first phase. A failure leaves the buffers as they were.

        Args:
            use: gets whole gradients before `sums`. What it does with them cannot be undone, so that this call runs no
                phase twice: all stages get their seeds.
        """
        with self, self.execution.generators:
            try:
                self._drive_forward(use)
            except DrewError:  # a stage drew for the first time: run again, each stage with its seeds
                self._rewind()
                self._drive_forward(use)
            self.check_forwards(memory=use is None)
            for stage in self.stages:
                stage.commit()

    def _drive_forward(self, use: EarlyUse | None) -> None:
        self.execution.feed(self.execution.setup.grad)
        self._drive(0, self._work(retain=False), use)

    def check_forwards(self, memory: bool = True) -> None:
        """Raise if a forward made numbers depend on the order of the chunks. Called after all forwards.

        Args:
            memory: check the parameters too. Where whole gradients were used early, that was done before.
        """
        if self._is_checked:
            return
        self._is_checked = True
        for stage in self.stages:
            if memory:
                stage.aliases.check_memory()
            external, layers = stage.external.leaves.values(), stage.layers
            self.communicator.topology.refuse_external(external, layers.name, layers.index)
        self.execution.check_snapshots({stage.layers.index: stage.snapshot for stage in self.stages})

    def _rewind(self) -> None:
        """Return to the state before the first action. From now on every stage gets its seeds."""
        for stage in self.stages:
            stage.rewind()
        self.execution.generators.seeds_all = True
        if self._loss_end is not None:
            self._loss_end.forget()
        self.outputs = []
        self.execution.forget()

    def run_backward(self, grads: Sequence[Grads], retain: bool, use: EarlyUse | None = None) -> None:
        """Run the second phase.

        Args:
            grads: of each chunk's outputs, in the process of the last stage.
            retain: another backward may come.
            use: as for `run_forward`.
        """
        self._resume()
        if self.execution.has_last:
            for chunk, chunk_grads in enumerate(grads):
                self.execution.mailbox.put_grads(CALLER, chunk, [chunk_grads])
        try:
            with self.execution.generators:
                self._drive(1, self._work(retain), use)
        except DrewError:
            self._drop()
            raise RuntimeError(
                "a backward drew from a default generator (torch's for the CPU, Python's or numpy's), or changed a "
                "switch of torch, which none did in earlier calls. Run forward and backward again: from now on it has "
                "the process for itself."
            ) from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        for stage in self.stages:
            stage.drop_sums()
        self._final_sums.clear()
        self.execution.drop_values()

    def _resume(self) -> None:
        ambient = self.execution.ambient.now()
        for stage in self.stages:
            stage.snapshot.resume(ambient)

    def abandon(self) -> None:
        """Undo a failed call: restore what modules hold, and drop what was kept."""
        for stage in self.stages:
            stage.rewind()
        self._loss_sums.clear()
        self._final_sums.clear()
        self.release()

    def release(self) -> None:
        """Drop what was kept for a backward."""
        for stage in self.stages:
            stage.release()
        self.outputs = []
        self.is_released = True

    def _drive(self, number: int, work: WorkTable, use: EarlyUse | None) -> None:
        execution, generators = self.execution, self.execution.generators
        generators.seeds_all = generators.seeds_all or use is not None
        try:
            with generators.touches.counted():
                execution.run(number, work, generators.seeds_all, self._on_final(use))
        except CheckpointError:  # an unseeded draw may be the reason why a recomputation differs
            if self._has_drawn_unseeded():
                raise DrewError from None
            raise
        # A backward alone may have, in one thread: all that it computed anew has drawn nothing in its forward.
        if self._has_drawn_unseeded() and (number == 0 or execution.has_threads):
            raise DrewError
        setup = execution.setup
        if generators.seeds_all and generators.spared:
            if any([stage.seeder.drew for stage in self.stages]) or self._tells_others:
                setup.traits.draws_nothing.discard(self._flags)
            elif not setup.grad or number + 1 == len(setup.plan.phases):  # the call is over
                setup.traits.draws_nothing.update({self._flags} - setup.traits.begins_to_draw)

    def _has_drawn_unseeded(self) -> bool:
        """Whether what gets no seeds was drawn from, or what stages share in several threads was written."""
        generators = self.execution.generators
        if generators.seeds_all or generators.are_untouched and not self._tells_others:
            return False
        traits = self.execution.setup.traits
        traits.draws_nothing.clear()  # what else is known will hardly hold on
        traits.begins_to_draw.add(self._flags)
        generators.touches.undo()
        return True

    @property
    def _tells_others(self) -> bool:
        """Whether a stage in a thread of its own has written what another one reaches."""
        return self.execution.has_threads and any([stage.snapshot.attributes.tells_others for stage in self.stages])

    # -------------------------------------------------------------------------------------------------------- work

    def _work(self, retain: bool) -> WorkTable:
        """The work of each kind of action. The table is not kept: a call must not refer to itself."""
        backward = partial(self._backward, retain)
        return {Kind.F: self._forward, Kind.B: backward, Kind.I: backward, Kind.W: partial(self._weights, retain)}

    def _forward(self, stage: int, chunk: int) -> None:
        execution, run = self.execution, self._run[stage]
        setup = execution.setup
        inbox = execution.take(stage, chunk)
        recompute = setup.grad and (stage, chunk) in setup.recompute
        outputs = run.forward(chunk, inbox, recompute, setup.grad and (setup.keep or recompute))
        if run.writes_input or inbox[0].written:
            written = written_until(run.layers.name, inbox, run.writes_input)
            outputs[0] = outputs[0]._replace(written=written)
        if stage != self._last:
            execution.mailbox.put(stage, chunk, outputs)
        else:
            (output,) = outputs
            if self._keeps_outputs:
                self.outputs.append(output)
            if self._loss_end is not None and True not in output.needs_grad:
                self._at_loss(chunk, output.tree)  # no backward needs it

    def _backward(self, retain: bool, stage: int, chunk: int) -> None:
        run = self._run[stage]
        setup = self.execution.setup
        find_roots: RootFinder
        if run.ends_in_loss:
            find_roots, wanted = partial(self._at_end, chunk), True
        else:
            output_grads = self.execution.take_grads(stage, chunk)
            find_roots = partial(_at_outputs, output_grads)
            wanted = any([grad is not None for grads in output_grads for grad in grads])
        if setup.traces and (stage, chunk) in setup.recompute:
            find_roots = partial(self._begin_recomputed, stage, chunk, find_roots)
        grads = run.backward(chunk, find_roots, wanted, retain)
        self.execution.mailbox.put_grads(stage, chunk, grads)

    def _begin_recomputed(self, stage: int, chunk: int, find_roots: RootFinder, output_edges: OutputEdges) -> Roots:
        self.execution.record_recomputation(stage, chunk)
        return find_roots(output_edges)

    def _weights(self, retain: bool, stage: int, chunk: int) -> None:
        self._run[stage].weights(chunk, retain)

    def _at_end(self, chunk: int, output_edges: OutputEdges) -> Roots:
        assert output_edges.outputs is not None  # the last stage keeps them for the loss
        return self._at_loss(chunk, output_edges.outputs.trees[0])

    def _at_loss(self, chunk: int, tree: Tree) -> Roots:
        assert self._loss_end is not None  # the stage ends in it
        if chunk == 0 and not self.execution.has_threads and self._has_drawn_unseeded():
            raise DrewError  # before loss_fn counts what it would count once more
        seeder = self._run[self._last].seeder
        seeder.seed(chunk, self.execution.layer_of_loss)
        roots = self._loss_end(chunk, tree)
        seeder.settle()
        return roots

    # --------------------------------------------------------------------------------------------------- gradients

    def _on_final(self, use: EarlyUse | None) -> Callable[[int], None] | None:
        """The function that is called with each stage whose sums are final. None: they wait for the end."""
        if use is not None:
            return partial(self._finish_stage, GradientFinalizer(self.stages, use, self._final_sums))
        runs_once = not self.execution.has_threads  # without threads a stage's first draw is noticed in time
        averager = self.communicator.averager
        return partial(self._announce, averager) if averager is not None and runs_once else None

    def _finish_stage(self, finalizer: GradientFinalizer, stage: int) -> None:
        start, run = perf_counter(), self._run[stage]
        with nullcontext() if self.execution.setup.keep else without_autocast():
            self._final_sums[stage] = self._take_sums(run)
            finalizer.settled(run)
        self.execution.record_update(stage, start)

    def _announce(self, averager: Averager, stage: int) -> None:
        """Announce that a stage's sums are final, unless the loss reads its parameters too."""
        self._final_sums[stage] = pairs = self._take_sums(self._run[stage])
        if not any([id(owner) in self._loss_sums for owner, _ in pairs]):
            averager.settled(stage, pairs)

    def input_grads(self) -> Grads:
        """The gradients of the input's tensors, after a backward. Empty: no tensor needs one."""
        if not any(self._live):
            return (None,) * len(self._live)
        take = self.execution.mailbox.take_grads
        chunks = range(self.batch.chunks) if 0 in self._run else ()
        return self._of_input([take(CALLER, chunk)[0] for chunk in chunks])

    def _of_input(self, chunk_grads: Sequence[Grads]) -> Grads:
        """Gradients of the input's tensors, of each chunk where the first stage is, joined in all processes."""
        none: Grads = (None,) * len(self._live)
        local_grads = [self._on_input_devices(grads) or none for grads in chunk_grads]
        message = Message(self.batch.join_grads(local_grads)) if 0 in self._run else None
        message = self.communicator.exchange.broadcast("the gradients of the input", 0, message)
        return self._on_input_devices(message.tensors)  # from another rank they come to the device of this one

    def _on_input_devices(self, grads: Grads) -> Grads:
        """Gradients of the input, on the input's devices."""
        carry = self.execution.setup.layout.transport.carry
        return tuple([
            grad if grad is None or grad.device == tensor.device else carry(grad, None, Place(tensor.device))
            for grad, tensor in zip(grads, self.batch.tree.tensors, strict=False)
        ])

    def sums(self) -> dict[int, Pair]:
        """By id of the owner: (owner, whole gradient), added in this order: the loss's own part, those of the stages.

        But for those that were used before.
        """
        final_sums, self._final_sums = self._final_sums, {}
        parts = [(-1, owner, grad) for owner, grad in self._loss_sums.values()]
        self._loss_sums.clear()
        parts += [
            (stage.layers.index, owner, grad)
            for stage in self.stages
            for owner, grad in final_sums.get(stage.layers.index) or self._take_sums(stage)
        ]
        return self.communicator.gradients.join(parts)

    @property
    def _loss_sums(self) -> dict[int, Pair]:
        return {} if self._loss_end is None else self._loss_end.sums

    def _take_sums(self, stage: StageRun) -> list[Pair]:
        place = self.execution.setup.layout.places[stage.layers.index]
        return self.execution.placement.to_owners(stage.take_sums(), place)

    def owners(self) -> list[Tensor]:
        """The parameters and external leaves that an output depends on, each once.

        Over ranks all whose gradients are wanted: a gradient by others (None) has autograd run this process's part of
        the backward too, for which the others wait.
        """
        uses = [
            stage.aliases.used_parameters if self.communicator.is_alone else [real for real, _ in stage.aliases.trained]
            for stage in self.stages
        ]
        owners = {id(owner): owner for used in uses for owner in used}
        owners.update({key: leaf for stage in self.stages for key, leaf in stage.external.leaves.items()})
        return list(owners.values())

    def differentiate(
        self, grads: Sequence[Grads], owners: Sequence[Tensor], create_graph: bool
    ) -> tuple[Grads, list[Tensor | None]]:
        """Gradients of the input's tensors and of `owners`, as differentiable functions. See second_order.py."""
        self._resume()
        return differentiate(self.execution, self.stages, self._live, grads, owners, create_graph)

    def differentiate_gradients(
        self, grads: Sequence[Grads], of_input: Grads, of_owners: Mapping[int, Pair]
    ) -> tuple[Grads, dict[int, Pair], list[Grads]]:
        """The derivatives of the gradients along cotangents. See gradient_product.py.

        Args:
            grads: of each chunk's outputs, in the process of the last stage.
            of_input: cotangents of the gradients of the input's tensors.
            of_owners: (owner, cotangent of its gradient) by the owner's id.

        Returns:
            The derivatives by the input's tensors; by the owners, (owner, derivative) by id; and by `grads`.
        """
        self._resume()
        product = GradientProduct(self.execution, self.stages, self._live, grads, of_input, of_owners)
        inputs, parts, outputs = product.run()
        places, to_owners = self.execution.setup.layout.places, self.execution.placement.to_owners
        owned_parts = [(stage, *to_owners([(owner, whole)], places[stage])[0]) for stage, owner, whole in parts]
        of_inputs = self._of_input(inputs) if any(self._live) else (None,) * len(self._live)
        return of_inputs, self.communicator.gradients.join(owned_parts), outputs


class DrewError(Exception):
    """A stage drew from a default generator that it gets no seed in, as it had never done so."""


def _at_outputs(output_grads: Sequence[Grads], output_edges: OutputEdges) -> Roots:
    if len(output_grads) == 1:
        return roots_of(output_grads[0], output_edges.edges)
    grads = [
        grad
        for value_grads, size in zip(output_grads, output_edges.sizes, strict=True)
        for grad in value_grads or (None,) * size
    ]
    return roots_of(grads, output_edges.edges)
