"""One stage during one call: its F, its B and its recomputation.

    F(i)   inputs --cut--> entry leaves --Entry--> layers on aliases of the parameters --> outputs --cut--> next stage
             kept: the graph stays            recomputed: the inputs stay, the graph saves nothing and goes
    B(i)   (R: the same again, on buffers and switches as they were)  autograd.backward(outputs, gradients)
             alias.grad += ...  the stage's sum, ascending in chunks     gradients at the cut --> previous stage

Parameters are in parameters.py, the state that a recomputation must find in recompute/snapshot.py, and the leaves that
a graph reaches in common/graph.py.

Whether a stage writes its input shows only afterwards: by version counters, and by value where it writes through
`.data`. So chunk 0 computes on a copy of its input in calls without gradients, in validating calls (1, 2, 4, 8, ...),
and where training flags or shapes are new. A stage that writes gets a copy of every chunk; one that begins to write at
a later chunk is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeline.common.errors import CheckpointError, DroppedError
from pipeline.common.graph import (
    MARK,
    OF_SCRIPTS,
    Roots,
    StrayGradientGuard,
    constants,
    enter,
    explore,
    gradients,
    has_tangents,
    holds,
    mark,
    owned,
    refuse_tangents,
    run_backward,
)
from pipeline.common.torch_modes import Ambient, without_autocast
from pipeline.data.pytrees import (
    Activations,
    Bundle,
    Grads,
    Tree,
    detached,
    memory_of,
    same_values,
    storage_of,
    versions,
)
from pipeline.data.values import Values
from pipeline.recompute.policy import SavingNothing, checkpointing
from pipeline.recompute.randomness import AcceleratorSeeder, KeptGenerators, LearningSeeder, Seeder, unobserved
from pipeline.recompute.snapshot import ForwardSnapshot, StageTraits
from pipeline.stage.batchnorm import Deferred
from pipeline.stage.hooks import grads_apart, hooks_asleep
from pipeline.stage.layers import StageLayers
from pipeline.stage.parameters import Aliases, Swap
from pipeline.stage.records import ChunkRecord, GraphRecord, OutputEdges, RecomputeRecord, StageInputs
from pipeline.stage.split_backward import Part, Site, catch_up, ends_without, survey, waiting

Begin: TypeAlias = Callable[[OutputEdges], Roots]
_NOTHING = nullcontext()
_NO_SITES: Sequence[Site] = ()
_REENTRANT = "CheckpointFunctionBackward"  # of torch.utils.checkpoint(use_reentrant=True)
BACKWARD = 0xFFFF  # draws in a backward (a noisy hook) have the seed of layer BACKWARD - last layer


class Shared(NamedTuple):
    """The settings that all stages of a call share.

    Attributes:
        values: what each stage reads and makes.
        grad: whether this call has gradients.
        ambient: torch's switches at the call.
        known: the traits that earlier calls have observed.
        compares: whether whole recomputations are compared with their forwards.
        defer: whether batch norms update their running statistics once, at the end.
        threads: whether other stages may compute at the same time.
        foreign: a lock, held while the hooks of leaves that several stages may have captured are disabled.
        keep: whether every chunk may have to be recomputed after the caller's own code has run (second order of
            `pipe(x)`).
        samples: whether to compare some entries of every recomputed output.
        seed: of the call.
        generators: puts the default generators back when a phase is over.
    """

    values: Values
    grad: bool
    ambient: Ambient
    known: StageTraits
    compares: bool
    defer: bool
    threads: bool
    foreign: threading.Lock
    keep: bool
    samples: bool
    seed: int
    generators: KeptGenerators


class StageRun:
    """One stage during one call.

    The fast path (`_forward_one`, `_backward_one`) is for the usual case: one tensor comes, the stage only reads it,
    and chunk 0 has shown all traits. It does only what differs from chunk to chunk, since right after a large
    kernel each function and each object costs several times what it costs between small ones. The general path gives
    the same bits.

    Args:
        layers: its layers.
        device: that on which it computes.
        bring: from a parameter to its values at this stage's place: itself, or a copy.
        shared: the settings that all stages share.
        split: the chunks whose backward is I and W.
        ends_in_loss: whether the loss is computed on its output, and differentiated with it.
    """

    def __init__(
        self,
        layers: StageLayers,
        device: torch.device,
        bring: Callable[[Tensor], Tensor],
        shared: Shared,
        split: Collection[int],
        ends_in_loss: bool,
    ) -> None:
        values, grad, ambient, known, compares, defer, threads, self._foreign_lock, keep, samples, seed, generators = (
            shared
        )
        index = self.index = layers.index
        self.grad = grad
        self._layers = layers
        self._deferred = Deferred([layer for _, layer in layers.numbered]) if defer else None
        self.ends_in_loss = ends_in_loss
        self._passes_one = len(values.rows) == len(values.made_by)  # there are no skips
        modules = self._layers.modules
        self.name = self._layers.name
        self._input_name = f"the input of {self.name}"
        self._known = known
        self.snapshot = ForwardSnapshot(modules, ambient, self.name, index, known, compares, samples)
        self._watch = StrayGradientGuard(self.name)
        self._is_quiet = self._layers.is_quiet
        watch = None if self._is_quiet and not compares else self._watch  # torch's own layers expose no tensor
        self.aliases = Aliases(modules, self._layers.numbered, self.name, watch, compares and grad, bring, grad)
        self._learns_draws = threads and (compares or self.snapshot.key not in known.draws_nothing)
        self.may_draw = not threads or self._learns_draws
        kind = LearningSeeder if self._learns_draws else Seeder if self.may_draw else AcceleratorSeeder
        self.seeder: Seeder = kind(seed, [device], generators)
        self._seeds_backward = self._looks_for_tangents = True
        # The backward of `pipe(x)` runs under whatever modes its caller sets; a step runs within the caller's autocast.
        self._modes_of_backward = nullcontext if keep else without_autocast
        self._new_seeder = partial(LearningSeeder, seed, [device], generators)
        self.foreign: dict[int, Tensor] = {}  # leaves of the user that are no parameters of this stage's modules
        self._foreign_versions: dict[int, int] = {}
        self._met: set[int] = set()  # ids of aliases and foreign leaves that a chunk has reached
        self._foreign_sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._records: dict[int, ChunkRecord | GraphRecord | RecomputeRecord] = {}
        self.split = split
        self._waiting: dict[int, list[Part]] = {}  # the gradients that W of a chunk will compute
        self._first = True  # no chunk has run yet
        self._is_usual = False  # see `_forward_one`
        self._swap = self.aliases.stand_in()
        # Without gradients no check finds a later chunk written through `.data`, which is the caller's own tensor.
        self._spares_caller = index == 0 and not grad and not self._is_quiet
        self.writes_input = True  # until chunk 0 shows that it does not, in this call or an earlier one
        self._saves_until_the_end = False  # a layer calls autograd within its forward

    @property
    def layers(self) -> StageLayers:
        """Its layers."""
        return self._layers

    @property
    def is_quiet(self) -> bool:
        """Whether all its layers are torch's own and certainly draw no random number."""
        return self._is_quiet

    @property
    def reads(self) -> set[int]:
        """The ids of the parameters and other leaves that its layers read. Complete after its forwards."""
        return {*self.aliases.owners, *self.foreign}

    # ------------------------------------------------------------------------------------------------------- F

    def forward(self, chunk: int, inbox: Sequence[Activations], recompute: bool, keep: bool) -> list[Activations]:
        """F: compute one chunk.

        Args:
            chunk: its index.
            inbox: the values that this stage reads.
            recompute: whether to keep the input rather than the graph.
            keep: whether a recomputation may follow, of a kept chunk too (second order).
        """
        if self._is_usual and _is_one_tensor(inbox[0]):
            return self._forward_one(chunk, inbox[0], recompute, keep)
        first, self._first = self._first, False
        read, needs_grad = _read(inbox)
        if first:
            known = self._known.only_reads
            self.writes_input = self.snapshot.compares or not self.grad or self._read_key(read) not in known
        before = versions(read.tensors)
        if keep:
            self.snapshot.before_forward(chunk)
        cut, given, given_before, made = self._attempt(chunk, read, needs_grad, recompute, first)
        self.seeder.settle()
        if first and self.writes_input:
            self._learn_mutation(given, given_before, read)
        elif versions(read.tensors) != before:
            raise self._new_habit()
        buffers = self.snapshot.buffers
        if first:
            self._is_usual = self._passes_one and not (
                self.writes_input
                or self._spares_caller
                or self.snapshot.compares
                or self._deferred
                or buffers
                or self.split
            )
        tensors = buffers.hand_over(made.tensors) if buffers else detached(made.tensors)
        if keep or buffers:
            self.snapshot.after_forward(chunk, keep, tensors)
        need = self._need(made.tensors)
        if True in need:
            nodes, sites = 0, _NO_SITES
            split = chunk in self.split and not recompute
            if first or split or not self._reaches_the_same(read):
                roots = [tensor for tensor in made.tensors if tensor.requires_grad]
                nodes, sites = self._learn_graph(roots, (*cut.leaves, *given), split)
            if recompute:
                fixed = constants(roots) if self.snapshot.compares else ()
                self._records[chunk] = ChunkRecord(read, needs_grad, None, None, before, nodes, constants=fixed)
            else:
                exits = OutputEdges.of(made, self.ends_in_loss)
                self._records[chunk] = ChunkRecord(None, (), cut, exits, (), nodes, sites)
        return self._messages(chunk, inbox, given, made, tensors, need)

    def _forward_one(self, chunk: int, message: Activations, recompute: bool, keep: bool) -> list[Activations]:
        """F on the fast path: one input tensor, and nothing left to observe.

        The same as above with less Python, which is slow after a large kernel has emptied the processor's caches.
        """
        (read,), (needs_grad,) = message.tree.tensors, message.needs_grad
        before = read._version
        if keep:
            self.snapshot.before_forward(chunk)
        try:
            saving = self._saving_nothing() if recompute else None
            cut, made = self._run_one(chunk, read, needs_grad, saving)
        except DroppedError:
            if self._saves_until_the_end:
                raise
            self._saves_until_the_end = True
            self.snapshot.put_back(chunk, first=False)
            return self._forward_one(chunk, message, recompute, keep)
        if self._learns_draws:
            self.seeder.settle()
        if read._version != before:
            raise self._new_habit()
        tensors = detached(made.tensors)
        if keep:
            self.snapshot.after_forward(chunk, keep, tensors)
        need = self._need(made.tensors)
        if True in need:
            if not self._is_quiet:
                self._learn_graph([tensor for tensor in made.tensors if tensor.requires_grad], cut.leaves, False)
            if recompute:
                self._records[chunk] = RecomputeRecord(read, needs_grad, before)
            else:
                exits = OutputEdges.of(Bundle((made,), made.tensors), self.ends_in_loss)
                self._records[chunk] = GraphRecord(cut, exits)
        if len(tensors) == 1:
            return [Activations(Tree(tensors, made.skeleton), need)]
        return self._messages(chunk, [message], (read,), Bundle((made,), made.tensors), tensors, need)

    def _run_one(
        self, chunk: int, read: Tensor, needs_grad: bool, around: AbstractContextManager[None] | None
    ) -> tuple[StageInputs, Tree]:
        """Run the layers on the one input tensor; return the cut and the output."""
        with self._swap:
            if around is None:
                cut, (given,) = self._enter_one(read, needs_grad)
                value = self._layers.run_on(chunk, given, self.seeder.seed)
            else:
                with around:
                    cut, (given,) = self._enter_one(read, needs_grad)
                    value = self._layers.run_on(chunk, given, self.seeder.seed)
        made = Tree((value,), None) if type(value) is Tensor else self._layers.taken_apart(value)
        if self._looks_for_tangents:
            refuse_tangents(made.tensors)
        return cut, made

    def _messages(
        self,
        chunk: int,
        inbox: Sequence[Activations],
        given: Sequence[Tensor],
        made: Bundle,
        tensors: tuple[Tensor, ...],
        need: tuple[bool, ...],
    ) -> list[Activations]:
        """The messages of `tensors`, which are those of `made`, detached."""
        if self._passes_one and len(tensors) == len(given) == 1:  # no other tensor can share their memory
            return [Activations(Tree(tensors, made.trees[0].skeleton), need)]
        came_on = [memory for message in inbox for memory in message.memory]
        known = dict(zip(map(storage_of, given), came_on, strict=bool(came_on)))
        memory = memory_of(made.tensors, known, self.index, chunk)
        parts = zip(made.trees, made.split(tensors), made.split(need), made.split(memory), strict=True)
        return [
            Activations(Tree(tuple(part), tree.skeleton), tuple(wants), tuple(on)) for tree, part, wants, on in parts
        ]

    def _need(self, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        """For each output, whether it needs a gradient."""
        if len(tensors) == 1:
            return (self.grad and tensors[0].requires_grad,)
        return tuple([self.grad and tensor.requires_grad for tensor in tensors])

    def _attempt(
        self, chunk: int, read: Bundle, needs_grad: Sequence[bool], recompute: bool, first: bool
    ) -> tuple[StageInputs, tuple[Tensor, ...], tuple[int, ...], Bundle]:
        """Cut and compute. If a layer calls autograd within a forward that saves nothing, run again, saving."""
        cut, given = self._enter(read, needs_grad)
        given_before = versions(given) if self.writes_input else ()
        with self.aliases.stand_in():
            if not recompute:
                return cut, given, given_before, self._outputs(chunk, read.build(given), is_first=True)
            try:
                with self._saving_nothing():
                    return cut, given, given_before, self._outputs(chunk, read.build(given), is_first=True)
            except DroppedError:
                if self._saves_until_the_end:
                    raise
        self._saves_until_the_end = True
        self.snapshot.put_back(chunk, first)
        return self._attempt(chunk, read, needs_grad, recompute, first)

    def _saving_nothing(self) -> AbstractContextManager[None]:
        """Within: F of a chunk that will be recomputed. Tensors for a layer's own autograd are freed at its end."""
        return checkpointing(True) if self._saves_until_the_end else SavingNothing()

    def _outputs(self, chunk: int, values: Sequence[Any], is_first: bool = False) -> Bundle:
        """Run the layers on what the stage reads: the value before them, then the skips that they pop.

        `is_first`: this is F, not a recomputation.
        """
        with _NOTHING if self._deferred is None else self._deferred.within(chunk if is_first else None):
            made = self._layers.run(chunk, values, self.seeder.seed)
        refuse_tangents(made.tensors)
        return made

    def _enter(self, read: Bundle, needs_grad: Sequence[bool]) -> tuple[StageInputs, tuple[Tensor, ...]]:
        """Cut: the leaves of this chunk, and the tensors that the layers get."""
        tensors = read.tensors
        if self.writes_input or self._spares_caller:
            tensors = tuple([tensor.clone() for tensor in tensors])
        if len(tensors) == len(read.trees) == 1:  # the usual case
            return self._enter_one(tensors[0], needs_grad[0])
        leaves = [self._leaf(tensor) if needs else None for tensor, needs in zip(tensors, needs_grad, strict=True)]
        wanted = [leaf for leaf in leaves if leaf is not None]
        values = [tensor for tensor, needs in zip(tensors, needs_grad, strict=True) if needs]
        arrived: list[Tensor | None] = [None] * len(wanted)
        entered = iter(enter(self._watch, arrived, values, *wanted) if wanted else ())
        given = [t.detach() if leaf is None else next(entered) for leaf, t in zip(leaves, tensors, strict=True)]
        return StageInputs(tuple(leaves), arrived, [len(tree.tensors) for tree in read.trees]), tuple(given)

    def _enter_one(self, tensor: Tensor, needs_grad: bool) -> tuple[StageInputs, tuple[Tensor, ...]]:
        if not needs_grad:
            return StageInputs((None,), [], (1,)), (tensor.detach(),)
        leaf = self._leaf(tensor)
        arrived: list[Tensor | None] = [None]
        return StageInputs((leaf,), arrived, (1,)), enter(self._watch, arrived, (tensor,), leaf)

    def _leaf(self, tensor: Tensor) -> Tensor:
        """The leaf at which the graph of a chunk ends at this input: one number, which keeps nothing alive."""
        return mark(torch.empty((), device=tensor.device, requires_grad=True), self._input_name)

    def _new_habit(self) -> CheckpointError:
        return CheckpointError(
            f"{self.name} wrote its input in place, which it did not do before: for the first chunk, or in earlier "
            "calls. Write it for every chunk or for none (for example x = x + 1 instead of x += 1)."
        )

    def _learn_mutation(self, given: Sequence[Tensor], given_before: Sequence[int], read: Bundle) -> None:
        """Observe, after F of chunk 0 on a clone, whether this stage writes its input."""
        if (self.snapshot.compares or not self.grad) and _differ(given, read.tensors):
            self._known.writes_unseen.add(self.index)
        unseen = self.index in self._known.writes_unseen
        self.writes_input = unseen or versions(given) != given_before
        if not self.writes_input:
            self._known.only_reads.add(self._read_key(read))

    def _read_key(self, read: Bundle) -> tuple[object, ...]:
        """The key of that trait. It has shapes: a stage may pad odd lengths and write the copy, and else its input."""
        return *self.snapshot.key, *[tensor.shape[1:] for tensor in read.tensors]

    def begin(self) -> None:
        """Begin a phase: note which modes are on, in a thread whose modes are those of all threads."""
        self._seeds_backward = not self._is_quiet or not unobserved()
        self._looks_for_tangents = has_tangents()

    def commit(self) -> None:
        """Record the observed traits, and apply deferred updates. Called after all forwards."""
        self.snapshot.note()
        if self._deferred is not None:
            self.snapshot.buffers.note_writes(self._deferred.commit(), self.name)

    def learn_draws(self) -> None:
        """Hold the host's generators, and find out whether that was needed."""
        if not self.may_draw:
            self._learns_draws = self.may_draw = True
            self.seeder = self._new_seeder()

    def note_draws(self) -> None:
        """Record, after a phase, whether this stage drew from a default generator of the host."""
        if self._learns_draws:
            key = self.snapshot.key
            (self._known.draws_nothing.discard if self.seeder.drew else self._known.draws_nothing.add)(key)

    def _learn_graph(
        self, roots: Sequence[Tensor], leaves: Sequence[Tensor | None], split: bool
    ) -> tuple[int, Sequence[Site]]:
        """Find the leaves that this chunk's graph reaches. See common/graph.py and split_backward.py."""
        reached, sites = survey(roots, self.aliases.may_wait) if split else (explore(roots), ())
        own = {id(leaf) for leaf in leaves if leaf is not None}
        for key, leaf in reached.leaves.items():
            if key in self._met or key in own:
                continue
            if key in self.aliases:
                self.aliases.use(key)
            else:
                self._learn_foreign(key, leaf)
            self._met.add(key)
        return reached.nodes, sites

    def _reaches_the_same(self, read: Bundle) -> bool:
        """Whether each chunk's graph has the leaves of the first: torch's own layers capture nothing."""
        if not self._is_quiet or self.snapshot.compares:
            return False
        for tensor in read.tensors:
            if type(tensor) is not Tensor:
                return False
        return True

    def _learn_foreign(self, key: int, leaf: Tensor) -> None:
        what = getattr(leaf, MARK, None)
        if what is not None:
            raise RuntimeError(
                f"{self.name} computes with a tensor that depends on {what} but did not come through its input (kept "
                "on a module, in a closure or in a cache). Its gradient would be lost. Return it from the stage "
                "that makes it and pass it on, or put these layers into one stage."
            )
        self.foreign[key] = leaf
        self._foreign_versions.setdefault(key, leaf._version)

    # ------------------------------------------------------------------------------------------------------- B

    @property
    def kept_graphs(self) -> Iterator[Tensor | GradientEdge]:
        """The roots of the graphs that chunks keep for their backward."""
        for record in self._records.values():
            exits = None if isinstance(record, RecomputeRecord) else record.exits
            yield from [root for root in (exits.edges if exits is not None else ()) if root is not None]

    def backward(self, chunk: int, begin: Begin, wanted: bool, retain: bool) -> list[Grads]:
        """B, or I: add to the sums, and return the gradients of each value that was read (empty: there are none).

        I leaves the gradients of weights that can wait to W.

        Args:
            chunk: its index.
            begin: from the end of this chunk's graph to where the backward begins.
            wanted: whether there is any gradient to propagate.
            retain: another backward of this chunk may come.
        """
        record = self._records.get(chunk) if retain else self._records.pop(chunk, None)
        if record is None or not wanted:
            return [()] * (1 + self._layers.pops)
        if not isinstance(record, ChunkRecord):
            kept = record if isinstance(record, GraphRecord) else self._recompute_one(chunk, record)
            return self._backward_one(chunk, kept, begin, retain)
        if record.cut is None or record.exits is None:
            cut, outputs = self._recompute(chunk, record)
            roots = begin(OutputEdges.of(outputs, whole=True))
            ends = [tensor for tensor in outputs.tensors if tensor.requires_grad]
            sites = survey(ends, self.aliases.may_wait)[1] if chunk in self.split else ()
            del outputs, ends
        else:
            cut, sites = record.cut, record.sites
            roots = begin(record.exits)
        if roots.tensors:
            if self._seeds_backward or self.ends_in_loss:
                self.seeder.seed(chunk, BACKWARD - self._layers.numbered[-1][0])
            with self._watch, self._differentiating(), self._modes_of_backward():
                if chunk in self.split:
                    self._differentiate_but_wait(chunk, roots, cut, retain, sites)
                else:
                    self._differentiate(roots, cut, retain)
        self.seeder.settle()
        if not retain:
            self.snapshot.forget(chunk)
        return cut.grads()

    def _backward_one(self, chunk: int, kept: GraphRecord, begin: Begin, retain: bool) -> list[Grads]:
        """B of a chunk on the fast path."""
        roots = begin(kept.exits)
        if roots.tensors:
            if self._seeds_backward or self.ends_in_loss:
                self.seeder.seed(chunk, BACKWARD - self._layers.numbered[-1][0])
            if self._is_quiet and not roots.foreign:
                with self._watch, self._modes_of_backward():
                    run_backward(roots.tensors, roots.grads, retain)
            else:
                with self._watch, self._differentiating(), self._modes_of_backward():
                    self._differentiate(roots, kept.cut, retain)
        if self._learns_draws:
            self.seeder.settle()
        if not retain:
            self.snapshot.forget(chunk)
        return kept.cut.grads()

    def _differentiating(self) -> AbstractContextManager[None]:
        """Within: autograd runs, and with it the recomputations of a layer's own torch.utils.checkpoint."""
        if self._is_quiet:  # torch's layers have none
            return self.differentiating()
        if self._deferred is None:
            return self.aliases.stand_in()
        return _both(self.aliases.stand_in(), self.differentiating())

    def differentiating(self) -> AbstractContextManager[None]:
        """Within: a layer's own torch.utils.checkpoint may recompute, except for a deferred batch norm."""
        return _NOTHING if self._deferred is None else self._deferred.refused(self.name)

    def weights(self, chunk: int, retain: bool) -> None:
        """W: add the gradients that I of this chunk left to the sums. `retain`: another backward may follow."""
        if chunk in self._waiting:
            if self._seeds_backward:
                self.seeder.seed(chunk, BACKWARD - self._layers.numbered[-1][0])
            with self._watch, self._modes_of_backward():
                catch_up(self._waiting.pop(chunk), self.name, retain)
            self.seeder.settle()

    def _differentiate_but_wait(
        self, chunk: int, roots: Roots, cut: StageInputs, retain: bool, sites: Sequence[Site]
    ) -> None:
        if self.foreign or roots.foreign:  # all gradients are requested by name, now
            sites = ()
        late = {id(weight) for site in sites for weight in site.weights}
        waited = {id(weight) for parts in self._waiting.values() for part in parts for weight in part.site.weights}
        if not waited <= late:
            for earlier in sorted(self._waiting):  # sums ascend in chunks: earlier ones come first
                catch_up(self._waiting.pop(earlier), self.name, retain)
        with waiting(sites) as parts:
            self._differentiate(roots, cut, retain, sites)
        if parts:
            self._waiting[chunk] = parts

    def _differentiate(self, roots: Roots, cut: StageInputs, retain: bool, sites: Sequence[Site] = ()) -> None:
        own = [leaf for leaf in cut.leaves if leaf is not None]
        if not self.foreign and not roots.foreign:
            ends = ends_without(sites, own + self.aliases.used) if sites else ()
            run_backward(roots.tensors, roots.grads, retain, ends)
            return
        # Through `.grad` a foreign leaf would get each chunk's part separately, and its hooks would run on each; so its
        # sum is kept here. The graph is retained, since chunks share what was computed outside the stage.
        aliases, foreign = self.aliases.used, list({**self.foreign, **roots.foreign}.values())
        if holds(roots.tensors, _REENTRANT):  # whose backward can only write `.grad`
            with self._foreign_lock, grads_apart(foreign) as parts:
                run_backward(roots.tensors, roots.grads, retain=True)
            self._add_foreign(zip(foreign, parts, strict=True))
            return
        with self._foreign_lock, hooks_asleep(foreign):
            found = gradients(roots.tensors, own + aliases + foreign, roots.grads, retain=True)
        for alias, grad in zip(aliases, found[len(own) :], strict=False):
            if grad is not None:
                self.aliases.add(alias, grad)
        self._add_foreign(zip(foreign, found[len(own) + len(aliases) :], strict=True))

    def _add_foreign(self, pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        for leaf, grad in pairs:
            if grad is not None:
                _, total = self._foreign_sums.get(id(leaf), (leaf, None))
                self._foreign_sums[id(leaf)] = leaf, owned(grad, leaf) if total is None else total + grad

    def _recompute(self, chunk: int, record: ChunkRecord) -> tuple[StageInputs, Bundle]:
        """R: the forward of a chunk once more, with its graph kept."""
        assert record.inbox is not None  # a record holds its input or its graph
        self.check_unchanged(chunk)
        self._check_input(chunk, record.inbox.tensors, record.input_versions)
        with self.snapshot.as_at_forward(chunk), self.aliases.stand_in():
            cut, given = self._enter(record.inbox, record.needs_grad)
            outputs = self._outputs(chunk, record.inbox.build(given))
        if self.snapshot.compares:
            self._check_path(chunk, outputs, record)
        self.snapshot.check_same(chunk, outputs.tensors)
        return cut, outputs

    def _recompute_one(self, chunk: int, then: RecomputeRecord) -> GraphRecord:
        """R of a chunk on the fast path."""
        self.check_unchanged(chunk)
        if then.read._version != then.version:
            self._check_input(chunk, (then.read,), (then.version,))
        cut, made = self._run_one(chunk, then.read, then.needs_grad, self.snapshot.as_at_forward(chunk))
        self.snapshot.check_same(chunk, made.tensors)
        return GraphRecord(cut, OutputEdges.of(Bundle((made,), made.tensors), whole=True))

    def _check_path(self, chunk: int, outputs: Bundle, record: ChunkRecord) -> None:
        roots = [tensor for tensor in outputs.tensors if tensor.requires_grad]
        nodes = explore(roots).nodes if roots else 0
        differs = ""
        if nodes != record.nodes and not holds(roots, OF_SCRIPTS):  # torch.jit compiles between its first runs
            differs = f"{record.nodes} autograd nodes then, {nodes} now"
        pairs = zip(record.constants, constants(roots), strict=False)
        for (name, then), (_, now) in pairs if nodes == record.nodes else ():
            if then != now:
                differs = f"an autograd.Function kept {name} = {then} then, {now} now"
        if differs:
            raise CheckpointError(
                f"the recomputation of {self.name}, chunk {chunk}, took another path than its forward: {differs}. A "
                "layer depends on state that changed in between, such as a counter in its class, a global or a "
                "closure. Make it an attribute or a buffer, test pipeline.is_recomputing() where a module counts, or "
                "use checkpoint='never'."
            )

    def check_unchanged(self, chunk: int) -> None:
        """Raise if a parameter or a captured leaf was written since F."""
        self.aliases.check_versions(chunk)
        for key, leaf in self.foreign.items():
            if leaf._version != self._foreign_versions[key]:
                raise CheckpointError(
                    f"a tensor (shape {list(leaf.shape)}) that {self.name} captured was changed in place between the "
                    f"forward and the recomputation of chunk {chunk}. Change it after backward()."
                )

    def _check_input(self, chunk: int, tensors: Sequence[Tensor], then: Sequence[int]) -> None:
        if versions(tensors) != then:
            shapes = [list(tensor.shape) for tensor in tensors]
            raise CheckpointError(
                f"the input of {self.name} (shapes {shapes}) was changed in place between the forward and the "
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
        with self.snapshot.as_at_forward(chunk), self.on_views(views):
            tensors = [tensor.clone() for tensor in read.tensors] if self.writes_input else read.tensors
            made = self._outputs(chunk, read.build(tensors))
        self.snapshot.check_same(chunk, made.tensors)
        return made

    def on_views(self, views: dict[int, Tensor]) -> Swap:
        """Within: the modules compute with `views` of the real parameters."""
        return self.aliases.stand_back(views)

    # ------------------------------------------------------------------------------------------------- gradients

    def take_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter or foreign leaf, this stage's sum over chunks), and forget the sums."""
        yield from self.aliases.take_sums()
        sums, self._foreign_sums = self._foreign_sums, {}
        yield from sums.values()

    def drop_sums(self) -> None:
        """Drop the sums after a failed backward."""
        self.aliases.drop_sums()
        self._foreign_sums.clear()
        self._waiting.clear()

    def rewind(self) -> None:
        """Undo what the forwards and backwards did; traits stay."""
        self.snapshot.roll_back()
        self.drop_sums()
        self._records.clear()
        self._is_usual = False
        self.snapshot.release()

    def release(self) -> None:
        """Drop everything that was kept for a backward."""
        self._records.clear()
        self._waiting.clear()
        self.snapshot.release()
        self.aliases.release()


def _read(inbox: Sequence[Activations]) -> tuple[Bundle, Sequence[bool]]:
    """The values that a stage has read as one bundle, and which of its tensors need a gradient."""
    if len(inbox) == 1:  # the usual case
        (message,) = inbox
        return Bundle((message.tree,), message.tree.tensors), message.needs_grad
    read = Bundle.of(tuple([message.tree for message in inbox]))
    return read, [need for message in inbox for need in message.needs_grad]


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


def _is_one_tensor(message: Activations) -> bool:
    """Whether a message is one plain tensor with a version counter."""
    if message.tree.skeleton is not None:
        return False
    (tensor,) = message.tree.tensors
    return type(tensor) is Tensor and not tensor.is_inference()


def _differ(given: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Compare by value: writes may bypass version counters (inference mode, `.data`). Not on a GPU, which waits."""
    pairs = [(one, other) for one, other in zip(given, tensors, strict=True) if one.device.type == "cpu"]
    return any([not same_values(one, other) for one, other in pairs])
