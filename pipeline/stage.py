"""One stage during one call: what do F, B and a recomputation of it do?

    F(i)   inputs --cut--> entry leaves --Entry--> layers on aliases of the parameters --> outputs --cut--> next stage
             kept: the graph stays            recomputed: the inputs stay, the graph saves nothing and goes
    B(i)   (R: the same again, on buffers and switches as they were)  autograd.backward(outputs, gradients)
             alias.grad += ...  the stage's sum, ascending in chunks     entry leaf.grad --> previous stage

An alias is a leaf of its own on the parameter's memory (`nn.Parameter(p.detach())`, version counter shared) that stands
in the module's `_parameters` while the stage computes. So the parameters themselves see one whole gradient per backward
pass, as in the plain module: their hooks act once, and DistributedDataParallel counts once. Parameters and buffers are
read from the modules at each call, never cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipeline.ambient import Ambient
from pipeline.buffers import Buffers
from pipeline.checkpoint import recomputing, saving_nothing
from pipeline.errors import CheckpointError, DroppedError
from pipeline.graph import MARK, enter, explore, gradients, hooks_asleep, mark, owned, run_backward
from pipeline.randomness import (
    HostStates,
    Seeder,
    generators_at,
    host_at,
    host_states,
    private_generators,
    same_host_states,
)
from pipeline.trees import (
    Checksums,
    Grads,
    Message,
    Tree,
    checksums,
    detached,
    flatten,
    same_checksums,
    storage_of,
    versions,
)

Place: TypeAlias = dict[str, Any]  # module._parameters; under functional_call it holds plain tensors
GradsOf: TypeAlias = Callable[[Tree], Grads]


class _Parameter(NamedTuple):
    place: Place  # module._parameters
    name: str
    real: Tensor
    alias: Tensor  # the parameter itself where it is frozen
    version: int


class _Entered(NamedTuple):
    """The cut before a stage: a leaf for each input (None where no gradient is wanted), and where gradients arrive."""

    leaves: tuple[Tensor | None, ...]
    arrived: list[Tensor | None]  # one for each leaf

    def grads(self) -> Grads:
        """What arrived, for each input; taken out."""
        found = iter(self.arrived.copy())
        self.arrived[:] = [None] * len(self.arrived)
        return tuple([None if leaf is None else next(found, None) for leaf in self.leaves])


class _Record(NamedTuple):
    """What stays between F and B of one chunk. Kept: the cut and the outputs. Recomputed: the input."""

    message: Message | None
    entered: _Entered | None
    outputs: Tree | None
    input_versions: tuple[int, ...]
    nodes: int


class StageRun:
    """The layers of one stage, with what one call knows of them.

    Args:
        index: the stage.
        first_layer: index of its first layer in the Sequential.
        layers: the layers.
        grad: whether this call has gradients.
        seeder: seeds the generators for each (chunk, layer).
        ambient: torch's switches at the call.
        compares: whether recomputations are compared with their forwards by value.
    """

    def __init__(
        self,
        index: int,
        first_layer: int,
        layers: Sequence[nn.Module],
        grad: bool,
        seeder: Seeder,
        ambient: Ambient,
        compares: bool,
    ) -> None:
        self.index = index
        self.grad = grad
        self._layers = tuple(enumerate(layers, first_layer))
        self._seeder = seeder
        self._ambient = ambient
        self.modules = _modules(layers)
        self.buffers = Buffers(self.modules)
        self._generators = private_generators(self.modules)
        self._generator_states: dict[int, list[tuple[torch.Generator, Tensor]]] = {}
        self._draws_from_host = False  # from Python's or numpy's global generators: chunk 0 shows
        self._host_states: dict[int, HostStates] = {}
        self._saves_until_the_end = False  # a layer calls autograd within its forward: chunk 0 shows
        self._flags = [module.training for module in self.modules]
        self._parameters = _parameters(self.modules, f"stage {index}") if grad else ()
        self._aliases = {id(slot.alias): slot.real for slot in self._parameters if slot.alias is not slot.real}
        self._alias_places = [(slot.place, slot.name, slot.alias) for slot in self._parameters]
        self._as_at_forward: list[Callable[[], AbstractContextManager[None]]] = []  # see `resume`
        self._used: set[int] = set()  # ids of aliases that an output depends on
        self.foreign: dict[int, Tensor] = {}  # leaves of the user that are no parameters of this stage's modules
        self._foreign_sums: dict[int, Tensor] = {}
        self._records: dict[int, _Record] = {}
        self._compares = compares
        self._checksums: dict[int, Checksums] = {}
        self._parameter_sums = checksums([slot.real for slot in self._parameters]) if compares else []
        self._mutates_input = True  # until chunk 0 has shown that it does not
        self._first = True

    @property
    def layers(self) -> str:
        """The layers in words, for notes."""
        first, last = self._layers[0][0], self._layers[-1][0]
        return f"layer {first}" if first == last else f"layers {first}..{last}"

    # ------------------------------------------------------------------------------------------------------- F

    def forward(self, chunk: int, message: Message, recompute: bool, keep: bool) -> Message:
        """F: compute one chunk.

        Args:
            chunk: its index.
            message: the input.
            recompute: keep the input rather than the graph.
            keep: a recomputation may come, of a kept chunk too (second order).
        """
        tensors = message.tree.tensors
        before = versions(tensors)
        self.buffers.before_forward(chunk, keep)
        if keep:
            self._keep_generators(chunk)
        if not self.grad:
            given = tuple([tensor.clone() for tensor in tensors]) if self._mutates_input else tensors
            given_before = versions(given)
            output = self._outputs(chunk, message.tree.build(given))
            self._learn_mutation(given, given_before, message, before)
            self.buffers.after_forward()
            return Message(self._handed_over(output), (False,) * len(output.tensors))
        entered, given = self._enter(message)
        given_before = versions(given)
        with self._aliased():
            if recompute:
                try:
                    output = self._outputs_only(chunk, message.tree.build(given))
                except DroppedError:
                    if not self._first:
                        raise
                    self._saves_until_the_end = True
                    self.buffers.roll_back()
                    entered, given = self._enter(message)
                    given_before = versions(given)
                    output = self._outputs_only(chunk, message.tree.build(given))
            else:
                output = self._outputs(chunk, message.tree.build(given))
        if keep and self._first:
            self._draws_from_host = not same_host_states(self._host_states[chunk], host_states())
        self._learn_mutation(given, given_before, message, before)
        self.buffers.after_forward()
        needs_grad = tuple(tensor.requires_grad for tensor in output.tensors)
        if any(needs_grad):
            nodes = self._learn_graph([tensor for tensor in output.tensors if tensor.requires_grad], entered.leaves)
            kept = _Record(None, entered, output, (), nodes)
            self._records[chunk] = _Record(message, None, None, before, nodes) if recompute else kept
        if keep and self._compares:
            self._checksums[chunk] = checksums(output.tensors)
        return Message(self._handed_over(output), needs_grad)

    def _handed_over(self, output: Tree) -> Tree:
        tensors = self.buffers.hand_over(output.tensors) if self.buffers else detached(output.tensors)
        return Tree(tensors, output.skeleton)

    def _outputs(self, chunk: int, value: Any) -> Tree:
        seed = self._seeder.seed
        for index, layer in self._layers:
            seed(chunk, index)
            value = layer(value)
        return flatten(value, f"the output of stage {self.index} ({self.layers})")

    def _outputs_only(self, chunk: int, value: Any) -> Tree:
        with saving_nothing(self._saves_until_the_end):
            return self._outputs(chunk, value)

    def _keep_generators(self, chunk: int) -> None:
        """Keep the states of generators that no seed of ours reaches, for the recomputation."""
        if self._generators:
            self._generator_states[chunk] = [(generator, generator.get_state()) for generator in self._generators]
        if self._first or self._draws_from_host:
            self._host_states[chunk] = host_states()

    def _enter(self, message: Message) -> tuple[_Entered, tuple[Tensor, ...]]:
        """Cut: the leaves of this chunk, and what the layers get."""
        tensors = message.tree.tensors
        if self._mutates_input:
            tensors = tuple([tensor.clone() for tensor in tensors])
        leaves: list[Tensor | None] = []
        for tensor, needs_grad in zip(tensors, message.needs_grad, strict=True):
            leaf = mark(tensor.detach().requires_grad_(), f"the input of stage {self.index}") if needs_grad else None
            leaves.append(leaf)
        wanted = [leaf for leaf in leaves if leaf is not None]
        arrived: list[Tensor | None] = [None] * len(wanted)
        entered = iter(enter(arrived, *wanted) if wanted else ())
        given = [t.detach() if leaf is None else next(entered) for leaf, t in zip(leaves, tensors, strict=True)]
        return _Entered(tuple(leaves), arrived), tuple(given)

    def _learn_mutation(
        self, given: Sequence[Tensor], given_before: Sequence[int], message: Message, before: Sequence[int]
    ) -> None:
        """After F: does this stage write its input? Chunk 0 got a clone; from then on it is known."""
        if self._first:
            self._first = False
            self._mutates_input = versions(given) != given_before or _differ(given, message.tree.tensors)
            if self._mutates_input and _share_memory(message.tree.tensors):
                raise RuntimeError(
                    f"stage {self.index} ({self.layers}) writes its input in place, and two tensors of that input "
                    "share memory: one would see what is written into the other, which a stage boundary cannot "
                    "keep. Write to a copy (x * 2 instead of x.mul_(2)), or put these layers into the stage before."
                )
        elif versions(message.tree.tensors) != before:
            raise CheckpointError(
                f"stage {self.index} ({self.layers}) wrote its input in place, which it did not do for the first "
                "chunk. Write it for every chunk or for none (for example x = x + 1 instead of x += 1)."
            )

    def _learn_graph(self, roots: Sequence[Tensor], leaves: Sequence[Tensor | None]) -> int:
        """Which leaves does this chunk's graph reach? See graph.py."""
        reached = explore(roots)
        own = {id(leaf) for leaf in leaves if leaf is not None}
        for key, leaf in reached.leaves.items():
            if key in self._aliases:
                self._used.add(key)
            elif key not in own:
                self._learn_foreign(key, leaf)
        return reached.nodes

    def _learn_foreign(self, key: int, leaf: Tensor) -> None:
        what = getattr(leaf, MARK, None)
        if what is not None:
            raise RuntimeError(
                f"stage {self.index} ({self.layers}) computes with a tensor that depends on {what} but did not come "
                "through its input (kept on a module, in a closure or in a cache). Its gradient would be lost. "
                "Return it from the stage that makes it and pass it on, or put these layers into one stage."
            )
        self.foreign[key] = leaf

    # ------------------------------------------------------------------------------------------------------- B

    def backward(self, chunk: int, grads_of: GradsOf, wanted: bool, retain: bool) -> Grads | None:
        """B: add to the sums, and return the gradients of the input (None: no gradient comes or goes here).

        Args:
            chunk: its index.
            grads_of: from the outputs of this chunk to their gradients.
            wanted: whether there is any gradient to propagate.
            retain: another backward of this chunk may come.
        """
        record = self._records.get(chunk) if retain else self._records.pop(chunk, None)
        if record is None or not wanted:
            return None
        if record.entered is None or record.outputs is None:
            entered, output = self._recompute(chunk, record)
        else:
            entered, output = record.entered, record.outputs
        grads = grads_of(output)
        pairs = [
            (tensor, grad)
            for tensor, grad in zip(output.tensors, grads, strict=True)
            if grad is not None and tensor.requires_grad
        ]
        if pairs:
            with self._aliased():  # a layer's own torch.utils.checkpoint runs its forward now
                roots, root_grads = zip(*pairs, strict=True)
                self._differentiate(roots, root_grads, entered.leaves, retain)
        if not retain:
            self.buffers.forget(chunk)
            self._generator_states.pop(chunk, None)
            self._host_states.pop(chunk, None)
        return entered.grads()

    def _differentiate(
        self, roots: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor | None], retain: bool
    ) -> None:
        if not self.foreign:
            run_backward(roots, grads, retain)
            return
        # Through `.grad` a foreign leaf would get each chunk's part by itself, hooks and all; so its sum is kept here.
        # The graph is retained, since what was computed outside the stage is shared by the chunks; ours goes anyway.
        own = [leaf for leaf in leaves if leaf is not None]
        aliases = [slot.alias for slot in self._parameters if id(slot.alias) in self._used]
        aliases = list({id(alias): alias for alias in aliases}.values())
        foreign = list(self.foreign.values())
        targets = own + aliases + foreign
        with hooks_asleep(foreign):
            found = gradients(roots, targets, grads, retain=True)
        for alias, grad in zip(aliases, found[len(own) :], strict=False):
            if grad is not None:
                alias.grad = owned(grad, alias) if alias.grad is None else alias.grad + grad
        for leaf, grad in zip(foreign, found[len(own) + len(aliases) :], strict=True):
            if grad is not None:
                total = self._foreign_sums.get(id(leaf))
                self._foreign_sums[id(leaf)] = owned(grad, leaf) if total is None else total + grad

    def _recompute(self, chunk: int, record: _Record) -> tuple[_Entered, Tree]:
        """R: the forward of a chunk once more, with its graph kept."""
        assert record.message is not None  # a record holds its input or its graph
        self.check_unchanged(chunk, record.message.tree.tensors, record.input_versions)
        with self.as_at_forward(chunk), self._aliased():
            entered, given = self._enter(record.message)
            output = self._outputs(chunk, record.message.tree.build(given))
        self._check_same(chunk, output)
        roots = [tensor for tensor in output.tensors if tensor.requires_grad]
        nodes = explore(roots).nodes if roots else 0
        if nodes != record.nodes:
            raise CheckpointError(
                f"the recomputation of stage {self.index} ({self.layers}), chunk {chunk}, took another path than its "
                f"forward: {record.nodes} autograd nodes then, {nodes} now. A layer depends on state that changed in "
                "between, such as a counter. Make it a buffer, test pipeline.is_recomputing() where a module "
                "counts, or use checkpoint='never'."
            )
        return entered, output

    def _check_same(self, chunk: int, output: Tree) -> None:
        """Now and then: compare a recomputation's values with those of its forward."""
        before = self._checksums.get(chunk)
        if before is not None and not same_checksums(before, checksums(output.tensors)):
            raise CheckpointError(
                f"the recomputation of stage {self.index} ({self.layers}), chunk {chunk}, gave other values than its "
                "forward. A layer depends on state that its forward changes and that is no buffer (a counter, a "
                "tensor in a list, a random.Random). Make it a buffer, or use checkpoint='never' and no "
                "create_graph."
            )

    # ------------------------------------------------------------------------------------- as it was at the forward

    def resume(self, now: Ambient) -> None:
        """The backward begins, maybe long after the forward: find out which switches and flags differ by now."""
        self._as_at_forward = []
        if now != self._ambient:
            self._as_at_forward.append(self._ambient.entered)
        if self._flags != [module.training for module in self.modules]:
            self._as_at_forward.append(partial(_training_flags, self.modules, self._flags))

    @contextmanager
    def as_at_forward(self, chunk: int) -> Iterator[None]:
        """Within: gradients are on; switches, flags, buffers and generators are as they were at F of `chunk`."""
        with ExitStack() as stack:
            stack.enter_context(recomputing())
            for differing in self._as_at_forward:
                stack.enter_context(differing())
            if self.buffers:
                stack.enter_context(self.buffers.as_before(chunk))
            if self._generators:
                stack.enter_context(generators_at(self._generator_states[chunk]))
            if self._draws_from_host:
                stack.enter_context(host_at(self._host_states[chunk]))
            yield

    def check_unchanged(self, chunk: int, tensors: Sequence[Tensor], then: Sequence[int]) -> None:
        """Raise if a parameter or the input of `chunk` was written since F."""
        for slot in self._parameters:
            if slot.real._version != slot.version:
                raise CheckpointError(
                    f"parameter '{self._name_of(slot)}' (shape {list(slot.real.shape)}) of stage {self.index} was "
                    f"changed in place between the forward and the recomputation of chunk {chunk}: it is at version "
                    f"{slot.real._version}, expected version {slot.version}. Step the optimizer after backward()."
                )
        if versions(tensors) != tuple(then):
            shapes = [list(tensor.shape) for tensor in tensors]
            raise CheckpointError(
                f"the input of stage {self.index} (shapes {shapes}) was changed in place between the forward and the "
                f"recomputation of chunk {chunk}. Change it after backward(), or give the pipe a clone."
            )

    def check_parameters(self) -> None:
        """Now and then: did the forwards write a parameter without its version counter (`.data`)?"""
        silent = [slot for slot in self._parameters if slot.real._version == slot.version]
        if self._parameter_sums and len(silent) == len(self._parameters):
            if not same_checksums(self._parameter_sums, checksums([slot.real for slot in self._parameters])):
                raise CheckpointError(
                    f"a forward of stage {self.index} ({self.layers}) wrote a parameter through .data, unseen by "
                    "autograd: chunks that run in another order would see other values. Write parameters in a "
                    "torch.no_grad() block after the backward."
                )

    def _name_of(self, wanted: _Parameter) -> str:
        for index, layer in self._layers:
            for path, module in layer.named_modules():
                if module._parameters is wanted.place:
                    return ".".join(part for part in (str(index), path, wanted.name) if part)
        return wanted.name

    def _aliased(self) -> _Swap:
        return _Swap(self._alias_places)

    # -------------------------------------------------------------------------------------------- second order

    def compose(self, chunk: int, value: Any, views: dict[int, Tensor]) -> Any:
        """The stage as a plain differentiable function: on `views` of the real parameters, with no cut.

        Args:
            chunk: which chunk's random numbers and buffers to use.
            value: the stage's input, attached to the caller's graph.
            views: for each real parameter (by id) the tensor to compute with.
        """
        with self.as_at_forward(chunk), self.on_views(views):
            tree = self._outputs(chunk, value)
        self._check_same(chunk, tree)
        return tree.build(tree.tensors)

    def on_views(self, views: dict[int, Tensor]) -> AbstractContextManager[None]:
        """Within: the modules compute with `views` of the real parameters."""
        return _Swap([(slot.place, slot.name, views.get(id(slot.real), slot.real)) for slot in self._parameters])

    def own_input(self, value: Tensor) -> Tensor:
        """`value`, or a copy where the layers would write it."""
        return value.clone() if self._mutates_input else value

    # ------------------------------------------------------------------------------------------------- gradients

    def used_parameters(self) -> list[Tensor]:
        """The real parameters that an output depends on, each once, in the order of the modules."""
        found = {id(slot.real): slot.real for slot in self._parameters if id(slot.alias) in self._used}
        return list(found.values())

    def take_sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (parameter or foreign leaf, this stage's sum over chunks), and forget the sums."""
        for slot in self._parameters:
            if slot.alias is not slot.real and slot.alias.grad is not None:
                grad, slot.alias.grad = slot.alias.grad, None
                yield slot.real, grad
        sums, self._foreign_sums = self._foreign_sums, {}
        for key, grad in sums.items():
            yield self.foreign[key], grad

    def drop_sums(self) -> None:
        """Forget what was summed: the backward failed, or another one begins."""
        for slot in self._parameters:
            if slot.alias is not slot.real:
                slot.alias.grad = None
        self._foreign_sums.clear()

    def release(self) -> None:
        """Forget everything that was kept for a backward."""
        self._records.clear()
        self._generator_states.clear()
        self._host_states.clear()
        self._checksums.clear()


class _Swap:
    """Within: other tensors stand in the modules' places. At the end: what was found."""

    __slots__ = ("_places", "_found")

    def __init__(self, places: list[tuple[Place, str, Tensor]]) -> None:
        self._places = places
        self._found: list[Any] = []

    def __enter__(self) -> None:
        self._found = [place[name] for place, name, _ in self._places]
        for place, name, tensor in self._places:
            place[name] = tensor

    def __exit__(self, *exc: object) -> None:
        for (place, name, _), found in zip(self._places, self._found, strict=True):
            place[name] = found


def _differ(given: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """By value, for what version counters do not show (inference mode, `.data`). Not on a GPU: the host would wait."""
    pairs = [(one, other) for one, other in zip(given, tensors, strict=True) if one.device.type == "cpu"]
    return any([not torch.equal(one, other) for one, other in pairs])


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    places = [storage_of(tensor) for tensor in tensors]
    return len(set(places)) < len(places)


def _modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules of some layers, each once, parents first."""
    stack = list(reversed(layers))
    seen: dict[int, nn.Module] = {}
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            stack.extend(child for child in reversed(module._modules.values()) if child is not None)
    return list(seen.values())


def _parameters(modules: Sequence[nn.Module], what: str) -> tuple[_Parameter, ...]:
    aliases: dict[int, Tensor] = {}
    slots = []
    for module in modules:
        for name, real in module._parameters.items():
            if real is None:
                continue
            if id(real) not in aliases:
                aliases[id(real)] = _alias(real, what) if real.requires_grad else real
            slots.append(_Parameter(module._parameters, name, real, aliases[id(real)], real._version))
    return tuple(slots)


def _alias(real: Tensor, what: str) -> Tensor:
    if type(real) is nn.Parameter:
        return mark(nn.Parameter(real.detach()), f"a parameter of {what}")
    return mark(real.detach().requires_grad_(), f"a parameter of {what}")


@contextmanager
def _training_flags(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    found = [module.training for module in modules]
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
    try:
        yield
    finally:
        for module, flag in zip(modules, found, strict=True):
            module.training = flag
