"""The snapshot of a stage's forward: the state that a recomputation must find, and a check of what it computes.

    before F(i)   buffers, attributes, hooks and private generators: kept where they will be needed
    after F(i)    a few entries of each output are kept, now and then a sum over all of it
    R(i)          within `as_at_forward(i)`: switches, training flags, hooks, buffers, attributes, generators;
                  afterwards the outputs are compared

What a layer keeps elsewhere (in its class, a global, a closure) cannot be put back: the comparison finds it.

Entries are compared in every call on the CPU; on a GPU the host would have to wait for them. Calls 1, 2, 4, 8, ...
compare everywhere, with a sum over every output, the number of autograd nodes, and a look for parameters that a forward
wrote through `.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from partition.generators import Generator, generators_at, put_generators_back, same_state
from partition.modes import modes_of
from pipeline.common.errors import CheckpointError
from pipeline.common.module_tables import training_flags
from pipeline.common.torch_modes import Ambient
from pipeline.recompute.attributes import Attributes
from pipeline.recompute.buffers import Buffers, BufferValues
from pipeline.recompute.fingerprints import Fingerprints
from pipeline.recompute.module_hooks import HookEntries, ModuleHooks
from pipeline.recompute.policy import recomputing
from pipeline.recompute.randomness import private_generators
from pipeline.recompute.stage_attributes import StageAttributes

SharedObjects: TypeAlias = tuple[str, Iterable[tuple[int, str]]]
"""A stage's name, and the objects that it may share with others: see `ForwardSnapshot.shareable`."""


@dataclass(frozen=True)
class StageTraits:
    """The traits of a Pipe's stages, by index, as validating calls have observed them."""

    # Calls, by the stages' training flags, and with gradients or without: those that drew nothing from generators that
    # may be spared, nor touched the process otherwise; and those that began to, and so get all their seeds for ever.
    draws_nothing: set[tuple[object, ...]] = field(default_factory=set)
    begins_to_draw: set[tuple[object, ...]] = field(default_factory=set)
    writes_unseen: set[int] = field(default_factory=set)  # into its input, past the version counters
    writes_buffers: dict[tuple[int, tuple[bool, ...]], frozenset[int]] = field(default_factory=dict)  # of which modules
    only_reads: set[tuple[object, ...]] = field(default_factory=set)  # its input, with these training flags and shapes


class _ChunkStart(NamedTuple):
    """The state with which a forward, or the call, began."""

    attributes: Attributes
    hooks: HookEntries
    buffers: BufferValues
    generators: dict[int, tuple[Generator, Any]]  # private ones, by id, and their states


class ForwardSnapshot:
    """The state that recomputations of one stage must find in one call.

    Args:
        modules: the modules of the stage.
        ambient: torch's switches at the call.
        stage: how errors name the stage.
        index: its number.
        known: the traits that earlier calls have observed.
        compares: whether to observe those anew, and to compare whole outputs, not just some entries.
        tables: parameters that are restored beside attributes, where no aliases stand in for them.
        owners: the stages that reach a module's dict or a container, by id: each adds itself.

    Attributes:
        buffers: those of the modules.
        attributes: those of the modules.
        fingerprints: of what the forwards made.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        ambient: Ambient,
        stage: str,
        index: int,
        traits: StageTraits,
        compares: bool,
        tables: Sequence[dict[str, Any]] = (),
        owners: dict[int, set[int]] | None = None,
    ) -> None:
        self.key = index, modes_of(modules)
        self.buffers = Buffers(modules, None if compares else traits.writes_buffers.get(self.key))
        owners = {} if owners is None else owners
        self.attributes = StageAttributes(stage, modules, tables, self.buffers.ids, owners, index)
        self._hooks = ModuleHooks(modules)
        self.fingerprints = Fingerprints(sums=compares)
        self._first = self._found(self.attributes.first, private_generators(modules).items())
        self._before: dict[int, _ChunkStart] = {}  # by chunk
        self._modules = modules
        self._ambient = ambient
        self._stage = stage
        self._traits = traits
        self._differing: list[Callable[[], AbstractContextManager[None]]] = []  # see `resume`

    # ------------------------------------------------------------------------------------------------ at the forward

    def before_forward(self, chunk: int, keep: bool) -> None:
        """Look at the state that F of `chunk` will change. `keep`: a recomputation may need it."""
        attributes = self.attributes.before_forward() if self.attributes else self.attributes.first
        if keep:
            generators = {key: generator for key, (generator, _) in self._first.generators.items()}
            if attributes is not self._first.attributes:  # a forward may have made one
                generators = private_generators(self._modules)
            self._before[chunk] = self._found(attributes, generators.items())

    def _found(self, attributes: Attributes, generators: Iterable[tuple[int, Generator]]) -> _ChunkStart:
        states = {key: (generator, generator.get_state()) for key, generator in generators}
        return _ChunkStart(attributes, self._hooks.present(), self.buffers.present(), states)

    def after_forward(self, chunk: int, keep: bool, outputs: Sequence[Tensor]) -> None:
        """Observe what F changed, and keep fingerprints of its outputs."""
        self.buffers.after_forward()
        if keep:
            self.fingerprints[chunk] = self.fingerprints.of(outputs)

    def note(self) -> None:
        """Record the observed traits, after all forwards have succeeded."""
        self._traits.writes_buffers[self.key] = self.buffers.writers

    def shareable(self) -> Iterator[tuple[int, str]]:
        """The objects that other stages may share: buffers, and private generators by their id."""
        yield from self.buffers.shareable()
        for key in self._first.generators:
            yield key, "a random generator"

    def changed(self) -> Iterator[int]:
        """Those of them that the forwards of this call changed."""
        yield from self.buffers.written()
        for key, (generator, state) in self._first.generators.items():
            if not same_state(state, generator.get_state()):
                yield key

    def begin_again(self) -> None:
        """Give buffers and attributes what they held as the call began, where a forward has changed it."""
        self.buffers.put_back()
        self.attributes.roll_back(self._first.attributes)

    def roll_back(self, chunk: int | None = None) -> None:
        """Restore the state from before F of `chunk`, which has failed; as a rule that from the beginning of the call.

        Attributes too: one may say how long a table in a buffer is.
        """
        before = self._first if chunk is None else self._before.get(chunk, self._first)
        self.buffers.roll_back(before.buffers)
        put_generators_back(before.generators.values())
        self.attributes.roll_back(before.attributes)
        self._hooks.put_back(before.hooks)

    # ------------------------------------------------------------------------------------------ at the recomputation

    def resume(self, ambient: Ambient) -> None:
        """Begin a backward: find the switches and flags that differ from those of the forward; and tables of hooks."""
        self._differing = []
        self._hooks.resume()
        if ambient != self._ambient:
            self._differing.append(partial(self._ambient.entered, ambient.switches != self._ambient.switches))
        _, flags = self.key
        if flags != modes_of(self._modules):
            self._differing.append(partial(training_flags, self._modules, flags))

    def as_at_forward(
        self, chunk: int, again: bool = True, goes_backward: bool = False
    ) -> AbstractContextManager[None]:
        """Within: gradients are on; switches, flags, buffers, hooks and generators are as they were at F of `chunk`.

        Args:
            again: whether another recomputation of the chunk may come.
            goes_backward: whether `StageAttributes.as_left` will ask for the attributes that are left within.
        """
        before = self._before.get(chunk, self._first) if again else self._before.pop(chunk, self._first)
        contexts = [recomputing(), *[make() for make in self._differing]]
        if (hooks := self._hooks.as_before(before.hooks)) is not None:
            contexts.append(hooks)
        if self.attributes:
            contexts.append(self.attributes.as_before(chunk, before.attributes, goes_backward))
        if self.buffers:
            contexts.append(self.buffers.as_before(before.buffers, again))
        if before.generators:
            contexts.append(generators_at([*before.generators.values()]))
        return contexts[0] if len(contexts) == 1 else within(*contexts)

    def check_same(self, chunk: int, outputs: Sequence[Tensor]) -> None:
        """Raise if a recomputation gave other values than its forward."""
        if not self.fingerprints.agree(chunk, outputs):
            raise CheckpointError(
                f"the recomputation of {self._stage}, chunk {chunk}, gave other values than its forward. A layer "
                "depends on state outside its module that has changed since (in its class, a global, a closure), or "
                "its input was written through .data or numpy. Make it an attribute or a buffer, change it after "
                "backward(), or use checkpoint='never' and no create_graph."
            )

    def forget(self, chunk: int) -> None:
        """Drop the state for this chunk, which is not recomputed any more."""
        self.attributes.forget(chunk)
        self._before.pop(chunk, None)
        self.fingerprints.pop(chunk, None)

    def release(self) -> None:
        """Drop all state: no recomputation follows."""
        for state in (self.attributes, self._before, self.fingerprints):
            state.clear()


@contextmanager
def within(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Within: all of these, one in the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def remote_objects(stages: Sequence[Sequence[nn.Module]], local_stages: Container[int]) -> Iterator[SharedObjects]:
    """The objects of other processes' stages when the Pipe was built: each process has a copy of them."""
    for index, layers in enumerate(stages):
        if index not in local_stages:
            objects: list[tuple[int, str]] = []
            for placeholder in map(vars, layers):
                objects += [(key, "a random generator") for key in placeholder.get("generators", ())]
                if "held_buffers" in placeholder:
                    objects += [(key, "a buffer") for key in placeholder["held_buffers"].ids()]
            yield f"stage {index}", objects


def check_shared_state(snapshots: Sequence[tuple[str, ForwardSnapshot]], remote: Iterable[SharedObjects]) -> None:
    """Raise if two stages share a buffer or a generator that one of them changed: the order would matter.

    Args:
        snapshots: of each stage, with its name, after all forwards.
        remote: the objects of other processes' stages.
    """
    changed = {key for _, snapshot in snapshots for key in snapshot.changed()}
    if not changed:
        return
    holders: dict[int, tuple[str, str]] = {}  # by memory, or by the generator's id
    for name, objects in [*remote, *((name, snapshot.shareable()) for name, snapshot in snapshots)]:
        for key, description in objects:
            _, holder = holders.setdefault(key, (description, name))
            if holder != name and key in changed:
                raise RuntimeError(
                    f"{description} of {name} is shared with {holder} and was changed by a forward. Stages run "
                    "different chunks at a time, so the numbers would depend on the schedule. Put their layers "
                    "into one stage, or give each its own."
                )
