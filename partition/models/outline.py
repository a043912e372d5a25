"""The outline of a model: its own forward, run with stand-ins for its blocks and for what lies in other parts.

    model         embed  [block 0 ... block n-1]  norm   head
    outline       absent [stand-in ... stand-in]  absent absent     no parameters, and no numbers of theirs
    a run         some of the model's modules are put in; the stand-ins hand the hidden state through, and note what
                  they are called with beside it: masks, rotary tables

Modules without parameters are there, in eval mode, so that no run of an outline draws random numbers.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdRef

from partition.contents import storage_holder, version_of
from partition.errors import PartitionError
from partition.generators import generators_among, put_generators_back, stand_at, states_of
from partition.models.as_found import Hook, PutBacks, is_same, stays
from partition.models.following import ModuleCopies
from partition.models.inputs import Leaves, ModelInputs, UnlikeSampleError
from partition.models.lost import as_lost
from partition.models.passing import PassingPlan
from partition.models.references import drop_others, hooks_of, plain_attributes, references_of, renew_references
from partition.models.runs import (
    ArgumentKey,
    BlockChain,
    CallArguments,
    OutlineRun,
    OutlineRunEnd,
    Switches,
    chain_of,
    containers_of,
    numbers_of,
)
from partition.models.shapes import MadeUpBuffer, is_without_memory, poison
from partition.models.shares import unit_of
from partition.models.stand_ins import (
    AbsentModule,
    StandIn,
    VolatileAttributes,
    copied_module,
    copy_that_calls,
    rebuilt,
    shallow,
    without_numbers,
)
from partition.names import OF_EVERY_MODULE, behaviour_of, places_by_name, starts
from partition.randomness import generators_on


class _LastChunk(threading.local):
    """The chunk for which the model's forward ran last in a thread, and what it called blocks with.

    What it has set elsewhere, in a config or a global that blocks read, is of this chunk, too. It is no module, so no
    one takes it for the state of one.

    Attributes:
        identities: of the inputs.
        calls: the arguments of blocks, by what made them.
    """

    def __init__(self) -> None:
        self.identities: list[Any] = []
        self.calls: dict[Any, list[CallArguments]] = {}

    def __reduce__(self) -> tuple[type[_LastChunk], tuple[()]]:
        return _LastChunk, ()


class Outline(nn.Module):
    """The outline of a model.

    It is a module so that it may hang on another one as an attribute without being a part of it.

    Args:
        model: the model.
        chains: its blocks.
        inputs: what it is called with.
        part_names: the names of the modules that lie in parts, beside the blocks.
        volatile: the attributes that a forward sets.
        passing: the values that pass blocks by.
        shaping: the numbers of the blocks that are asked for the shapes of what they return.
        hooks: on what blocks return, which hand that to the model's forward, by the id of a block.
        own: the ids of tensors, lists, sets and dicts that a forward writes: each part has its own.
    """

    def __init__(
        self,
        model: nn.Module,
        chains: tuple[BlockChain, ...],
        inputs: ModelInputs,
        part_names: Sequence[str],
        volatile: VolatileAttributes,
        passing: PassingPlan = PassingPlan(),
        shaping: Container[int] = (),
        hooks: Mapping[int, Sequence[Hook]] = MappingProxyType({}),
        own: Container[int] = (),
    ) -> None:
        super().__init__()
        self.chains = chains
        self.inputs = inputs
        self.passing = passing
        self.places = places_by_name(model)
        containers = {name: model.get_submodule(name) for name in sorted(containers_of(model, chains))}
        numbers = {id(model.get_submodule(name)): calls for name, calls in numbers_of(model, chains).items()}
        absent = {id(module): module for module in map(model.get_submodule, part_names)}
        copies: dict[int, Any] = {}  # by the id of what is in the model
        kept = {*map(id, containers.values()), *numbers, *absent}
        for path, child in [
            (f"{name}.{key}" if name else key, child)
            for name, container in containers.items() for key, child in container.named_children()
        ]:  # fmt: skip
            if id(child) not in kept and id(child) not in copies:
                _refuse_scripts(path, child)
                _copy_in_eval_mode(child, volatile, own, copies)
        kept |= copies.keys()
        for module in absent.values():
            copy_that_calls(AbsentModule(module, volatile), module, volatile, copies)
        for block in [module for module in model.modules() if id(module) in numbers]:
            calls = numbers[id(block)]
            is_shaping = any([number in shaping for number in calls])
            StandIn(block, volatile, copies, calls, is_shaping, hooks.get(id(block), ()))
        root = rebuilt(model, _around_blocks, volatile, copies)
        self._references = {
            name: drop_others(root.get_submodule(name), copies.values(), references_of(module))
            for name, module in containers.items()
        }
        leaves = {id(leaf) for module in containers.values() for leaf in tree_leaves(references_of(module))}
        named = [*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
        self._referenced = [name for name, entry in named if name and id(entry) in leaves]
        self._copies = ModuleCopies(
            [(module, copies[id(module)]) for module in model.modules() if id(module) in kept], volatile
        )
        parents = [name.rpartition(".")[0] for name in part_names]  # some are in blocks
        self._around = sorted({*containers, *[name for parent in parents for name in starts(parent)]})
        self._roots: dict[torch.device | None, nn.Module] = {None: root}
        self.settings = {name: _lasting_attributes(module, volatile) for name, module in containers.items()}
        self._volatile = {
            name: OF_EVERY_MODULE | {key for owner, key in volatile if owner == id(module)}
            for name, module in containers.items()
        }
        self._last = _LastChunk()

    @property
    def buffers_beside(self) -> list[Tensor]:
        """The buffers of the model that are in no part."""
        root = self._roots[None]
        return [buffer for buffer in root.buffers() if not is_without_memory(buffer)]

    def lead(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Let copies of the model's modules follow what is set on these.

        Args:
            pairs: modules and their copies.
        """
        self._copies.add(pairs)

    def __deepcopy__(self, memo: Any) -> Outline:
        """It holds nothing of a part: copies of parts share it."""
        return self

    def alone(self) -> Outline:
        """The same outline, which keeps nothing where this one would find it."""
        outline: Outline = shallow(self)  # type: ignore[assignment]  # of the same type
        vars(outline).update(_roots={None: self._roots[None]}, _last=_LastChunk())
        return outline

    def run(
        self,
        run: OutlineRun,
        leaves: Leaves,
        device: torch.device,
        units: Mapping[str, Any],
        modes: Mapping[str, bool] = MappingProxyType({}),
    ) -> Any:
        """Run the model's forward.

        Args:
            run: what the blocks do.
            leaves: of the inputs.
            device: where it computes.
            units: the modules and parameters that are there, by their names in the model.
            modes: of the modules that contain others, by their names in the model: train mode or not. Others are in
                eval mode.

        Returns:
            What the model returns; None where the run ended at a block.
        """
        identities = _identities(self.inputs.travelling(leaves))
        if self._last.identities != identities:
            self._last.identities, self._last.calls = identities, {}
        given, leaves = leaves, [
            leaf.clone() if is_written and isinstance(leaf, Tensor) else leaf
            for leaf, is_written in zip(leaves, self.inputs.written, strict=True)
        ]  # fmt: skip
        root = self._on(device)
        copies = self._with_units(root, units)
        for name, module in copies.items():
            vars(module)["training"] = modes.get(name, False)
        absent = [parameter for name in self.settings for parameter in copies[name]._parameters.values()]
        run.spare([*units.values(), *leaves, *absent])
        earlier = self._kept(copies, given)
        versions = {place: version_of(value) for place, value in earlier.items() if isinstance(value, Tensor)}
        args, kwargs = self.inputs.called(leaves)
        try:
            with run.entered():
                returned = copies[""](*args, **kwargs)
        except OutlineRunEnd:
            returned = None
        except AttributeError as error:  # a copy has none that a forward sets
            for name, module in copies.items():
                if error.obj is module and error.name in self._volatile[name]:
                    self._refuse_kept(name, error.name)
            raise
        for (owner, name), value in self._kept(copies, given).items():
            before = earlier.get((owner, name))
            is_written = (owner, name) in versions and version_of(before) != versions[owner, name]
            if not is_written and is_same(value, before):
                continue
            if is_written or owner is None or not stays(value, before):
                self._refuse_kept(owner, name)
            vars(root.get_submodule(owner))[name] = value  # on this device: the next run finds it there
        return returned

    def _with_units(self, root: nn.Module, units: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Copies of the modules that contain others, by name, with some modules and parameters put in."""
        around = {id(root.get_submodule(name)) for name in self._around}
        present = {id(unit_of(root, name)): unit for name, unit in units.items()}
        top = copied_module(root, lambda tensor: present.get(id(tensor), tensor), present, among=around)
        copies = {name: top.get_submodule(name) for name in self.settings}
        present.update((id(unit_of(root, name)), unit_of(top, name)) for name in self._referenced)  # some are in units
        for name, keys in self._references.items():
            renew_references(copies[name], present, keys)
        return copies

    def _kept(self, copies: Mapping[str, nn.Module], given: Leaves) -> dict[tuple[str | None, Any], Any]:
        """The values that a forward may write: of modules that contain blocks, by their names, and the inputs."""
        values: dict[tuple[str | None, Any], Any] = {(None, number): leaf for number, leaf in enumerate(given)}
        for owner, volatile in self._volatile.items():
            for table in (vars(copies[owner]), copies[owner]._buffers):
                values.update([((owner, key), value) for key, value in table.items() if key not in volatile])
        return values

    def _refuse_kept(self, owner: str | None, name: Any) -> NoReturn:
        """Raise, since a forward has written something: of a module, or of the inputs."""
        path = f"{owner}.{name}" if owner else name
        words = f"keeps {path!r} from one call to the next"
        raise PartitionError(
            f"the model's own forward {words if owner is not None else f'writes {self.inputs.words(name)}'}, and each "
            "part runs that forward. Let a module of its own, that is called once, keep what is kept; of an input, "
            "write to a copy."
        )

    def call(
        self, number: int, hidden: tuple[Any, ...], travelling: tuple[Any, ...], passing: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any], Switches]:
        """The arguments of a block, args and kwargs, and the switches with which the model calls it."""
        chain, device = chain_of(self.chains, number), next(leaf.device for leaf in hidden if leaf is not None)
        carried = [(key, passing[index]) for key, index in self.passing.carried[number]]
        call = self.arguments_of_block(number, device, travelling)
        return *call.replaced([*zip(chain.entries, hidden, strict=True), *carried]), call.switches

    def arguments_of_block(self, number: int, device: torch.device, travelling: tuple[Any, ...]) -> CallArguments:
        """The arguments of a block, with nothing where what travels there goes.

        One run finds it for all blocks of a chain, in all stages of a thread, until another chunk is run.
        """
        end = chain_of(self.chains, number).last
        key = end, device, _stream(device), torch.is_inference_mode_enabled(), Switches.now()
        calls = self._last.calls.get(key)
        if calls is None or self._last.identities != _identities(travelling):
            run, rewind = OutlineRun(self.chains, end), self.generator_rewind(device, end, False)
            self.run(run, self.inputs.arrived(travelling, device), device, {})
            rewind()
            tensors = [tensor for call in run.calls for tensor in call.tensors]
            self._check_between(run, tensors, chain_of(self.chains, number))
            self._check_arguments(run)
            calls = [call.without(self._travelling(number)) for number, call in enumerate(run.calls)]
            if not any([call.may_change for call in calls]):  # else each block has its own
                self._last.calls[key] = calls
        return self.call_of_block(calls, number)

    def generator_rewind(self, device: torch.device, number: int, in_training: bool) -> Callable[[], object]:
        """Puts the default generators back to where they are now: what was drawn until it is called, others draw.

        It raises PartitionError where nothing was drawn there on the sample, since nobody has seen then who reads it,
        and where generators were drawn from that attributes of the modules are which contain blocks.

        Args:
            device: where the forward computes.
            number: of the last block of the chain at which it is called.
            in_training: whether the modules that contain blocks are in train mode.
        """
        held = [value for attributes in self.settings.values() for value in attributes.values()]
        states, own_states = states_of(generators_on([device])), states_of(generators_among(held).values())

        def rewind() -> None:
            if any([self.chains[chain].last == number for chain in self.passing.draws[in_training]]):
                put_generators_back(states)
            with _disable_current_modes():  # torch's fake mode tells no numbers
                is_drawn = not stand_at([*states, *own_states])
            if is_drawn:
                raise UnlikeSampleError(
                    "the model's own forward draws random numbers, which it did not",
                    "Each part would draw others: draw them before, and call the model with them. ",
                )

        return rewind

    def _check_between(self, run: OutlineRun, tensors: Sequence[Tensor], chain: BlockChain) -> None:
        """See that what the blocks of a chain are called with is as it was for each, and what travels there for all.

        Raises:
            PartitionError: the model computes something between two of them.
        """
        with torch._C.DisableTorchFunctionSubclass():
            pairs = zip(tensors, run.versions, strict=True)
            written = {id(tensor) for tensor, version in pairs if version_of(tensor) != version}
        for number, call in enumerate(run.calls[chain.first :], chain.first):
            slots = [(key, self.passing.slots[index]) for key, index in self.passing.carried[number]]
            differing = [
                key for key, (first, of_first) in slots
                if isinstance(of_first, tuple) and call[key] is not run.calls[first][of_first]
            ]  # fmt: skip
            if written:
                others = [(key, leaf) for key, leaf in call.leaves.items() if key not in chain.entries]
                differing += [key for key, leaf in others if id(leaf) in written]
            if differing:
                raise UnlikeSampleError(
                    f"argument {differing[0][0]!r} of block {self.name_of(number)!r} changes between two blocks: it is "
                    "written there, or another than",
                    "Write to a copy. ",
                )

    def _check_arguments(self, run: OutlineRun) -> None:
        """See that the leaves of blocks' arguments are here, but for those that travel there."""
        for number, call in enumerate(run.calls):
            travelling = self._travelling(number)
            for key, leaf in call.leaves.items():
                if key not in travelling:
                    run.here(leaf, f"argument {key[0]!r} of block {self.name_of(number)!r}")

    def _travelling(self, number: int) -> set[ArgumentKey]:
        """The arguments of a block that travel there."""
        return {*chain_of(self.chains, number).entries, *[key for key, _ in self.passing.carried[number]]}

    def name_of(self, number: int) -> str:
        """The name of a block."""
        return [name for chain in self.chains for name in chain.blocks][number]

    def call_of_block(self, calls: Sequence[CallArguments], number: int) -> CallArguments:
        """The call of a block in a run.

        Raises:
            PartitionError: the run ended before.
        """
        if number >= len(calls):
            raise UnlikeSampleError(
                f"the model's forward ended before it called block {self.name_of(number)!r}, which it called",
                "How many blocks it calls must not depend on what they compute. ",
            )
        return calls[number]

    def begin_call(self) -> None:
        """Forget what was made in an earlier call: it was made of the inputs, and of the model as it was then."""
        self._last = _LastChunk()
        if self._copies.follow():
            self._roots = {None: self._roots[None]}

    def _on(self, device: torch.device) -> nn.Module:
        """The root, with its buffers on a device."""
        if device not in self._roots:
            self._roots[device] = rebuilt(self._roots[None], lambda tensor: _on_device(tensor, device))
        return self._roots[device]


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; without memory there where it has none here."""
    if not is_without_memory(tensor):
        return tensor.to(device)
    return as_lost(poison(tensor, device))


def _around_blocks(tensor: Tensor) -> Tensor:
    """The stand-in for a parameter, or a buffer, of a module that contains blocks."""
    return without_numbers(tensor) if isinstance(tensor, nn.Parameter | MadeUpBuffer) else tensor


def _refuse_scripts(name: str, module: nn.Module) -> None:
    """Raise if a module of which the parts would have copies is, or holds, one that torch.jit has compiled."""
    if any([isinstance(submodule, torch.jit.ScriptModule) for submodule in module.modules()]):
        raise PartitionError(
            f"module {name!r} is, or holds, one that is compiled by torch.jit, and it is in no block: the parts would "
            "have copies of it, and nothing sees what these do. Cut the model before it is compiled, or put it into "
            "the blocks."
        )


def _copy_in_eval_mode(
    module: nn.Module, volatile: VolatileAttributes, own: Container[int], copies: dict[int, Any]
) -> None:
    """Add a copy of a module without parameters, in eval mode, which shares all that no forward writes, and hooks."""
    shared = {
        id(value): value for submodule in module.modules()
        for key, value in {**submodule._buffers, **plain_attributes(submodule), **hooks_of(submodule)}.items()
        if value is not None and (id(submodule), key) not in volatile and id(value) not in own
    }
    module_copy = copy.deepcopy(module, shared).eval()
    copies.update(
        (id(submodule), submodule_copy)
        for submodule, submodule_copy in zip(module.modules(), module_copy.modules(), strict=True)
    )


def _lasting_attributes(module: nn.Module, volatile: VolatileAttributes) -> dict[str, Any]:
    """The attributes of a module that no forward sets."""
    excluded = OF_EVERY_MODULE | references_of(module).keys()
    attributes = {key: value for key, value in vars(module).items() if key not in excluded}
    return {key: value for key, value in attributes.items() if (id(module), key) not in volatile} | behaviour_of(module)


def _identities(travelling: Iterable[Any]) -> list[Any]:
    """The inputs of a chunk, told from those of others; and from themselves, where attributes were put back since."""
    identities = [
        _identity(leaf) if isinstance(leaf, Tensor) else leaf if type(leaf) is tuple else repr(leaf)
        for leaf in travelling
    ]
    return [PutBacks.count, *identities]


def _identity(leaf: Tensor) -> tuple[Any, ...]:
    """The identity of an input's numbers: their memory, or the tensor itself where a gradient goes to it."""
    storage = leaf if leaf.requires_grad else storage_holder(leaf)
    if storage is leaf:
        return "leaf", WeakIdRef(leaf), version_of(leaf)
    return "memory", storage, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype, version_of(leaf)


def _stream(device: torch.device) -> int:
    return 0 if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device).stream_id
