"""One stage during one call: its F, its B and its recomputation.

    F(i)   inputs --cut--> entry leaves --Entry--> layers on aliases of the parameters --> outputs --cut--> next stage
             kept: the graph stays            recomputed: the inputs stay, the graph saves nothing and goes
    B(i)   (R: the same again, on buffers and switches as they were)  autograd.backward(outputs, gradients)
             alias.grad += ...  the stage's sum, ascending in chunks     gradients at the cut --> previous stage

There is one path for every module and every kind of value. It runs between large kernels, where each function and each
object costs several times what it costs between small ones, so what few stages need is asked for by one attribute.

The cut is in inputs.py, parameters are in parameters.py, other leaves that a graph reaches in external.py, the state
that a recomputation must find in recompute/snapshot.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

from partition.graph import nodes_of
from partition.halves import Site, ends_without, survey
from partition.precision import without_autocast
from partition.process_lock import run_in
from pipeline.common.errors import CheckpointError, DroppedError
from pipeline.common.graph import OF_SCRIPTS, Roots, holds, path_of, refuse_tangents, run_backward
from pipeline.common.profiling import named
from pipeline.common.torch_modes import Ambient
from pipeline.data.pytrees import Activations, Bundle, Grads, Tree, detached, memory_address, memory_of, versions
from pipeline.recompute.policy import SavingNothing, checkpointing
from pipeline.recompute.randomness import Seeder, unobserved
from pipeline.recompute.snapshot import ForwardSnapshot, StageTraits, within
from pipeline.stage.batchnorm import DeferredBatchNorms
from pipeline.stage.external import ExternalLeaves
from pipeline.stage.inputs import InputCut, StageInputs
from pipeline.stage.layers import StageLayers
from pipeline.stage.parameters import Aliases
from pipeline.stage.records import ChunkGraph, ChunkRecord, OutputEdges
from pipeline.stage.split_backward import SplitBackward
from scheduler import Action, Kind

RootFinder: TypeAlias = Callable[[OutputEdges], Roots]
_NOTHING = nullcontext()
BACKWARD = 0xFFFF  # draws in a backward (a noisy hook) have the seed of layer BACKWARD - last layer


class StageSettings(NamedTuple):
    """The settings that all stages of a call share.

    Attributes:
        grad: whether this call has gradients.
        ambient: torch's switches at the call.
        context: the context variables at the call, for recomputations.
        traits: the traits that earlier calls have observed.
        compares: whether whole recomputations are compared with their forwards.
        defer: whether batch norms update their running statistics once, at the end.
        external: a lock, held while the hooks of leaves that several stages may have captured are disabled.
        owners: the stages that reach a module's dict or a container, by id.
        keep: whether every chunk may have to be recomputed after the caller's own code has run (second order of
            `pipe(x)`).
        overlap: whether stages may compute at a time.
    """

    grad: bool
    ambient: Ambient
    context: Context
    traits: StageTraits
    compares: bool
    defer: bool
    external: threading.Lock
    owners: dict[int, set[int]]
    keep: bool
    overlap: bool


class StageRun:
    """One stage during one call.

    Args:
        layers: its layers.
        seeder: seeds them.
        bring: from parameters to their values at this stage's place: themselves, or copies.
        settings: those that all stages share.
        split: the chunks whose backward is I and W.
        ends_in_loss: whether the loss is computed on its output, and differentiated with it.
    """

    def __init__(
        self,
        layers: StageLayers,
        seeder: Seeder,
        bring: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        settings: StageSettings,
        split: Collection[int],
        ends_in_loss: bool,
    ) -> None:
        name, modules, traits, compares = layers.name, layers.modules, settings.traits, settings.compares
        grad = settings.grad
        self.layers = layers
        self.ends_in_loss = ends_in_loss
        self._settings = settings
        self._deferred = DeferredBatchNorms([layer for _, layer in layers.numbered]) if settings.defer else None
        self.snapshot = ForwardSnapshot(
            modules, settings.ambient, name, layers.index, traits, compares, owners=settings.owners
        )
        # Without gradients no check finds a later chunk written through `.data`, which is the caller's own tensor.
        is_of_caller = layers.index == 0 and not grad
        self._cut = InputCut(name, self.snapshot.key, traits, compares or not grad, is_of_caller)
        self.aliases = Aliases(modules, layers.numbered, name, self._cut.guard, compares and grad, bring, grad)
        self.external = ExternalLeaves(name, settings.external)
        self.seeder = seeder
        self._records: dict[int, ChunkRecord] = {}
        self._split = SplitBackward(name, split)
        self._saves_until_the_end = False  # a layer calls autograd within its forward

    @property
    def writes_input(self) -> bool:
        """Whether it writes its input, as far as is known."""
        return self._cut.writes

    @property
    def reads(self) -> set[int]:
        """The ids of the parameters and other leaves that its layers read. Complete after its forwards."""
        return {*self.aliases.owners, *self.external.leaves}

    # ------------------------------------------------------------------------------------------------------- F

    def forward(self, chunk: int, inbox: Sequence[Activations], recompute: bool, keep: bool) -> list[Activations]:
        """F: compute one chunk.

        Args:
            chunk: its index.
            inbox: the values that this stage reads.
            recompute: whether to keep the input rather than the graph.
            keep: whether a recomputation may follow, of a kept chunk too (second order).
        """
        read, needs_grad = _read(inbox)
        versions_before = versions(read.tensors)
        self._cut.begin(read)
        self.layers.outputs.begin()
        grad = self._settings.grad
        observes = grad or self._settings.overlap
        if observes:
            self.snapshot.before_forward(chunk, keep)
        try:
            inputs, layer_inputs, outputs = self._run(chunk, read, needs_grad, self._around_forward(chunk, recompute))
        except DroppedError:
            if self._saves_until_the_end:
                raise
            self._saves_until_the_end = True
            self.snapshot.roll_back(chunk)
            return self.forward(chunk, inbox, recompute, keep)
        self.seeder.settle()
        self._cut.end(read, versions_before, layer_inputs)
        buffers = self.snapshot.buffers
        tensors = buffers.hand_over(outputs.tensors) if buffers else detached(outputs.tensors)
        self.layers.outputs.hand_over(chunk, (*outputs.tensors, *tensors))
        if keep or buffers:
            self.snapshot.after_forward(chunk, keep, tensors)
        need = tuple([grad and tensor.requires_grad for tensor in outputs.tensors])
        if observes:
            self.snapshot.attributes.after_forward(chunk, is_kept=True in need and not recompute)
        if True in need:
            self._records[chunk] = self._record(
                chunk, read, needs_grad, versions_before, inputs, layer_inputs, outputs, recompute
            )
        return self._messages(chunk, inbox, layer_inputs, outputs, tensors, need)

    def _run(
        self, chunk: int, read: Bundle, needs_grad: Sequence[bool], context: AbstractContextManager[None]
    ) -> tuple[StageInputs, tuple[Tensor, ...], Bundle]:
        """Cut, and run the layers on aliases. Returns the cut, what the layers got, and what they made."""
        with context, self.aliases.stand_in():  # what is as at F has no stand-ins
            inputs, layer_inputs = self._cut.enter(chunk, read, needs_grad)
            outputs = self.layers.run(chunk, read.build(layer_inputs), self.seeder.seed)
        refuse_tangents(outputs.tensors)
        return inputs, layer_inputs, outputs

    def _around_forward(self, chunk: int, recompute: bool) -> AbstractContextManager[None]:
        saving: AbstractContextManager[None] = _NOTHING
        if recompute:  # tensors for a layer's own autograd are freed at the end
            saving = checkpointing(True) if self._saves_until_the_end else SavingNothing()
        return saving if self._deferred is None else within(saving, self._deferred.within(chunk))

    def _messages(
        self,
        chunk: int,
        inbox: Sequence[Activations],
        layer_inputs: Sequence[Tensor],
        outputs: Bundle,
        tensors: tuple[Tensor, ...],
        need: tuple[bool, ...],
    ) -> list[Activations]:
        """The messages of `tensors`, which are those of `outputs`, detached."""
        if self.layers.passes_one and len(tensors) == len(layer_inputs) == 1:  # no other tensor can share their memory
            return [Activations(Tree(tensors, outputs.trees[0].skeleton), need)]
        input_memory = [] if self._cut.writes else [memory for message in inbox for memory in message.memory]
        memory_by_storage = dict(zip(map(memory_address, layer_inputs), input_memory, strict=bool(input_memory)))
        memory = memory_of(outputs.tensors, memory_by_storage, self.layers.index, chunk)
        parts = zip(outputs.trees, outputs.split(tensors), outputs.split(need), outputs.split(memory), strict=True)
        return [
            Activations(Tree(tuple(part), tree.skeleton), tuple(needs_grad), tuple(memory_ids))
            for tree, part, needs_grad, memory_ids in parts
        ]

    def _record(
        self,
        chunk: int,
        read: Bundle,
        needs_grad: Sequence[bool],
        versions_before: tuple[int, ...],
        inputs: StageInputs,
        layer_inputs: Sequence[Tensor],
        outputs: Bundle,
        recompute: bool,
    ) -> ChunkRecord:
        """The record of a chunk, whose graph is walked: a layer may capture a leaf for some chunks only."""
        roots = [tensor for tensor in outputs.tensors if tensor.requires_grad]
        nodes = nodes_of(roots, ends=(inputs.entry, *self.aliases.ends))
        self.external.learn(chunk, self.aliases.learn(nodes), layer_inputs)
        if recompute:
            path = path_of(roots) if self._settings.compares else ()
            return ChunkRecord(None, read, needs_grad, versions_before, path)
        nodes = nodes if chunk in self._split else []
        return ChunkRecord(ChunkGraph(inputs, OutputEdges.of(outputs, self.ends_in_loss), nodes))

    def commit(self) -> None:
        """Record the observed traits, and apply deferred updates. Called after all forwards."""
        self.snapshot.note()
        if self._deferred is not None:
            self.snapshot.buffers.note_writes(self._deferred.commit(), self.layers.name)

    # ------------------------------------------------------------------------------------------------------- B

    @property
    def kept_graphs(self) -> Iterator[Tensor | GradientEdge]:
        """The roots of the graphs that chunks keep for their backward."""
        for record in self._records.values():
            if record.graph is not None:
                yield from [root for root in record.graph.edges.edges if root is not None]

    def refuse_stray(self, leaves: Collection[int]) -> None:
        """Raise if a graph outside the Pipe has reached this stage.

        Args:
            leaves: the ids of those that it reached.

        Raises:
            RuntimeError: a leaf of this stage is among them.
        """
        if any([leaf in self.aliases or leaf in self._cut for leaf in leaves]):
            self._cut.guard()

    def backward(self, chunk: int, find_roots: RootFinder, wanted: bool, retain: bool) -> list[Grads]:
        """B, or I: add to the sums, and return the gradients of each value that was read (empty: there are none).

        I leaves the gradients of weights that can wait to W.

        Args:
            chunk: its index.
            find_roots: from the end of this chunk's graph to where the backward begins.
            wanted: whether there is any gradient to propagate.
            retain: another backward of this chunk may come.
        """
        record = self._records.get(chunk) if retain else self._records.pop(chunk, None)
        if record is None or not wanted:
            return [()] * (1 + self.layers.pops)
        graph = record.graph or self._recompute(chunk, record, retain)
        roots, inputs, sites = find_roots(graph.edges), graph.inputs, self._sites(graph)
        del record, graph  # and with them outputs that no root needs
        if roots.tensors:
            self._seed_backward(chunk)
            self.aliases.begin_sums()
            left = self.snapshot.attributes.as_left(chunk)
            with left, self._cut.guard, self.standing(), self._modes_of_backward():
                if chunk in self._split:
                    self._differentiate_first(chunk, roots, inputs, sites, retain)
                else:
                    self._differentiate(roots, inputs, (), retain)
            self.aliases.end_sums()
        self.seeder.settle()
        if not retain:
            self.snapshot.forget(chunk)
        return inputs.grads()

    def weights(self, chunk: int, retain: bool) -> None:
        """W: add the gradients that I of this chunk left to the sums. `retain`: another backward may follow."""
        if self._split.waits(chunk):
            self._seed_backward(chunk)
            with self._cut.guard, self._modes_of_backward():
                self._split.second_half(chunk, retain)
            self.aliases.end_sums()
            self.seeder.settle()

    def _sites(self, graph: ChunkGraph) -> Sequence[Site]:
        """The uses of weights whose gradients W can compute. In I and not in F, which others wait for."""
        if not graph.nodes:
            return ()
        roots = [root for root in graph.edges.edges if root is not None]
        return survey(roots, graph.nodes, lambda leaf: id(leaf) in self.aliases)

    def _seed_backward(self, chunk: int) -> None:
        if self.ends_in_loss or not self.layers.is_quiet or not unobserved():
            self.seeder.seed(chunk, BACKWARD - self.layers.numbered[-1][0])

    def standing(self) -> AbstractContextManager[None]:
        """Within: aliases stand in the modules, and a layer's own torch.utils.checkpoint may recompute."""
        standing = self.aliases.stand_in()
        return standing if self._deferred is None else within(standing, self.differentiating())

    def differentiating(self) -> AbstractContextManager[None]:
        """Within: a layer's own torch.utils.checkpoint may recompute, except for a deferred batch norm."""
        return _NOTHING if self._deferred is None else self._deferred.refused(self.layers.name)

    def _modes_of_backward(self) -> AbstractContextManager[None]:
        """The backward of `pipe(x)` runs under whatever modes its caller sets; a step runs within its autocast."""
        return _NOTHING if self._settings.keep else without_autocast()

    def _differentiate_first(
        self, chunk: int, roots: Roots, inputs: StageInputs, sites: Sequence[Site], retain: bool
    ) -> None:
        if self.external.leaves or roots.foreign:  # all gradients are requested by name, now
            sites = ()
        with self._split.first_half(chunk, sites, retain):
            self._differentiate(roots, inputs, sites, retain)

    def _differentiate(self, roots: Roots, inputs: StageInputs, sites: Sequence[Site], retain: bool) -> None:
        if self.external.leaves or roots.foreign:
            self.external.differentiate(roots)
        else:
            ends = ends_without(sites, inputs.grad_leaves + self.aliases.used) if sites else ()
            run_backward(roots.tensors, roots.grads, retain, ends)

    def _recompute(self, chunk: int, record: ChunkRecord, again: bool) -> ChunkGraph:
        """R: the forward of a chunk once more, with its graph kept. `again`: another R of this chunk may come."""
        self.check_unchanged(chunk)
        self._check_input(chunk, record)
        context = self._around_recomputation(chunk, again, goes_backward=True)
        with named(Action(self.layers.index, Kind.R, chunk)):
            inputs, _, outputs = run_in(
                self._settings.context, self._run, chunk, record.read, record.needs_grad, context
            )
        roots = [tensor for tensor in outputs.tensors if tensor.requires_grad]
        if record.path:
            self._check_path(chunk, roots, record.path)
        self.snapshot.check_same(chunk, outputs.tensors)
        self.external.check_reached(chunk, outputs.tensors)
        return ChunkGraph(inputs, OutputEdges.of(outputs, whole=True), nodes_of(roots) if chunk in self._split else ())

    def _around_recomputation(
        self, chunk: int, again: bool = True, goes_backward: bool = False
    ) -> AbstractContextManager[None]:
        as_before = self.snapshot.as_at_forward(chunk, again, goes_backward)
        return as_before if self._deferred is None else within(as_before, self._deferred.within(None))

    def _check_path(self, chunk: int, roots: Sequence[Tensor], then: Sequence[tuple[str, str]]) -> None:
        pairs = zip(then, path_of(roots))
        what, earlier, value = next(((what, one, now) for (what, one), (_, now) in pairs if one != now), ("", "", ""))
        if what and not (what == then[0][0] and holds(roots, OF_SCRIPTS)):  # torch.jit compiles between its first runs
            raise CheckpointError(
                f"the recomputation of {self.layers.name}, chunk {chunk}, took another path than its forward: "
                f"{what}: {earlier} then, {value} now. A layer depends on state that changed in between, such as a "
                "counter in its class, a global or a closure. Make it an attribute or a buffer, test "
                "pipeline.is_recomputing() where a module counts, or use checkpoint='never'."
            )

    def check_unchanged(self, chunk: int) -> None:
        """Raise if a parameter or an external leaf was written since F."""
        self.aliases.check_versions(chunk)
        self.external.check_versions(chunk)

    def _check_input(self, chunk: int, record: ChunkRecord) -> None:
        tensors = record.read.tensors
        if versions(tensors) != record.versions:
            shapes = [list(tensor.shape) for tensor in tensors]
            raise CheckpointError(
                f"the input of {self.layers.name} (shapes {shapes}) was changed in place between the forward and the "
                f"recomputation of chunk {chunk}. Change it after backward(), or give the pipe a clone."
            )

    # -------------------------------------------------------------------------------------------- second order

    def compose(self, chunk: int, read: Bundle, views: dict[int, Tensor]) -> Bundle:
        """The stage as a plain differentiable function: on `views` of the real parameters, with no cut.

        Args:
            chunk: which chunk's random numbers and buffers to use.
            read: what the stage reads, attached to the caller's graph.
            views: for each real parameter (by id) the tensor to compute with.
        """
        with self.aliases.stand_back(views):
            outputs = self.rerun(chunk, read.build(self.layer_inputs(chunk, read.tensors)))
        refuse_tangents(outputs.tensors)
        self.snapshot.check_same(chunk, outputs.tensors)
        self.external.check_reached(chunk, outputs.tensors)
        return outputs

    def layer_inputs(self, chunk: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors on which the layers compute a chunk once more: these, or copies where F had copies.

        Kernels round by where a tensor begins in memory: a copy of rows of x begins elsewhere.
        """
        return self._cut.layer_inputs(chunk, tensors)

    def rerun(self, chunk: int, values: Sequence[Tree]) -> Bundle:
        """The layers once more, as at F of a chunk, on whatever stands in the modules."""
        return run_in(self._settings.context, self._rerun, chunk, values)

    def _rerun(self, chunk: int, values: Sequence[Tree]) -> Bundle:
        with self._around_recomputation(chunk):
            outputs = self.layers.run(chunk, values, self.seeder.seed)
        self.seeder.settle()
        return outputs

    # ------------------------------------------------------------------------------------------------- gradients

    def take_sums(self) -> list[tuple[Tensor, Tensor]]:
        """(Parameter or external leaf, this stage's sum over chunks) of all that have one; forgets the sums."""
        return [*self.aliases.take_sums(), *self.external.take_sums()]

    def drop_sums(self) -> None:
        """Drop the sums after a failed backward."""
        self.take_sums()
        self._split.clear()

    def rewind(self) -> None:
        """Undo what the forwards and backwards did; traits stay."""
        self.snapshot.roll_back()
        self.drop_sums()
        self._records.clear()
        self.snapshot.release()
        self.layers.outputs.clear()

    def release(self) -> None:
        """Drop everything that was kept for a backward."""
        self._records.clear()
        self._split.clear()
        self.snapshot.release()
        self.layers.outputs.clear()
        self.aliases.release()


def _read(inbox: Sequence[Activations]) -> tuple[Bundle, Sequence[bool]]:
    """The values that a stage has read as one bundle, and which of its tensors need a gradient."""
    read = Bundle.of(tuple(map(attrgetter("tree"), inbox)))
    return read, list(chain.from_iterable(map(attrgetter("needs_grad"), inbox)))
