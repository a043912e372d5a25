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
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partition.errors import PartitionError
from partition.models.as_found import Hook
from partition.models.following import Following
from partition.models.inputs import Leaves, ModelInputs
from partition.models.passing import Passing
from partition.models.references import by_name, put_in, references_of
from partition.models.returns import caught, check_noted
from partition.models.runs import (
    BlockChain,
    ModelCall,
    OutlineRun,
    Reached,
    Switches,
    around,
    chain_of,
    names_of,
    numbers_of,
    this_run,
)
from partition.models.shapes import MadeUp, TensorShape, is_without_memory
from partition.models.stand_ins import Absent, Shadow, StandIn, Volatile, autocast_of, forget_oldest, rebuilt, shallow
from partition.names import OF_EVERY_MODULE, behaviour_of, places_of


class _Made(NamedTuple):
    """The arguments of blocks.

    Attributes:
        inputs: the tensors that they were made from.
        calls: the arguments, by a block's number.
        tensors, versions: all that is in them and has a version, as it was made.
    """

    inputs: list[weakref.ref[Tensor]]
    calls: list[ModelCall]
    tensors: list[Tensor]
    versions: list[int]


class _ArgumentCache:
    """The arguments of blocks that were made from inputs. It is no module, so no one takes it for the state of one."""

    def __init__(self) -> None:
        self.made: OrderedDict[Any, _Made] = OrderedDict()
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type[_ArgumentCache], tuple[()]]:
        return _ArgumentCache, ()


class Outline(nn.Module):
    """The outline of a model.

    It is a module so that it may hang on another one as an attribute without being a part of it.

    Args:
        model: the model.
        chains: its blocks.
        inputs: what it is called with.
        apart: the names of the modules that lie in parts, beside the blocks.
        volatile: the attributes that a forward sets.
        passing: the values that pass blocks by.
        shaping: the numbers of the blocks that are asked for the shapes of what they return.
        hooks: on what blocks return, which hand that to the model's forward, by the id of a block.

    Attributes:
        first_names: of the modules `apart`, and of those that contain blocks, by each of their names.
    """

    def __init__(
        self,
        model: nn.Module,
        chains: tuple[BlockChain, ...],
        inputs: ModelInputs,
        apart: Sequence[str],
        volatile: Volatile,
        passing: Passing = Passing(),
        shaping: Container[int] = (),
        hooks: Mapping[int, Sequence[Hook]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.chains = chains
        self.inputs = inputs
        self.passing = passing
        self.places = places_of(model)
        numbers = numbers_of(model, chains)
        blocks = {own: model.get_submodule(name) for name, own in numbers.items()}
        stand_ins = {
            own: StandIn(block, own, volatile, any([number in shaping for number in own]), hooks.get(id(block), ()))
            for own, block in blocks.items()
        }
        replaced: dict[str, Shadow] = {name: stand_ins[own] for name, own in numbers.items()}
        containers = around(model, chains)
        all_names = names_of(model)
        first_names = {name: names[0] for names in all_names.values() for name in names}
        firsts = {key: names[0] for key, names in all_names.items()}
        firsts.update((id(each), name) for name, each in model.named_parameters())
        self._references = {
            name: by_name(references_of(model.get_submodule(name)), firsts) for name in sorted(containers)
        }
        self.first_names = {name: first_names[name] for name in (*apart, *containers)}
        for name in apart:
            absent = Absent(model.get_submodule(name), volatile, first_names[name])
            block = next((block for block in numbers if name.startswith(f"{block}.")), None)
            if block is None:
                replaced[name] = absent
            else:  # the model calls what is within a block
                *above, key = name.removeprefix(f"{block}.").split(".")
                replaced[block].get_submodule(".".join(["shadow", *above]))._modules[key] = absent
        known: dict[int, nn.Module] = {}
        root = _outlined(model, replaced, containers, "", volatile, known)
        self._roots: dict[torch.device | None, nn.Module] = {None: root}
        shown = [(model.get_submodule(name), each.shadow) for name, each in replaced.items()]
        own = [(module, known[id(module)]) for module in model.modules() if id(module) in known]
        self._following = Following([*own, *shown], volatile)
        self.settings = {name: _lasting(model.get_submodule(name), volatile) for name in sorted(containers)}
        self._in_eval_mode = dict.fromkeys(self.settings, False)
        self._memory = _ArgumentCache()

    def lead(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Let copies of the model's modules follow what is set on these.

        Args:
            pairs: modules and their copies.
        """
        self._following.add(pairs)

    def __deepcopy__(self, memo: Any) -> Outline:
        """It holds nothing of a part: copies of parts share it."""
        return self

    def alone(self) -> Outline:
        """The same outline, which keeps nothing where this one would find it."""
        made: Outline = shallow(self)  # type: ignore[assignment]  # of the same type
        vars(made).update(_roots={None: self._roots[None]}, _memory=_ArgumentCache())
        return made

    def run(
        self,
        run: OutlineRun,
        leaves: Leaves,
        device: torch.device,
        own: Mapping[str, Any],
        modes: Mapping[str, bool] = MappingProxyType({}),
    ) -> Any:
        """Run the model's forward.

        Args:
            run: what the blocks do.
            leaves: of the inputs.
            device: where it computes.
            own: the modules and parameters that are there, by their names in the model.
            modes: of the modules that contain others, by their names in the model: train mode or not. Others are in
                eval mode.

        Returns:
            What the model returns; None where the run ended at a block.
        """
        copies = _put_in(self._on(device), own, {**self._in_eval_mode, **modes})
        for name, references in self._references.items():
            put_in(copies[name], references, copies[""])
        there = [*copies.items(), *own.items()]
        modules = [(self.first_names[name], each) for name, each in there if name in self.first_names]
        absent = [each for name in self.settings for each in copies[name]._parameters.values()]
        run.spare([*own.values(), *leaves, *absent])
        versions = self._versions(copies)
        args, kwargs = self.inputs.called(leaves)
        token = this_run.set(run)
        try:
            with caught(run, modules):
                returned = copies[""](*args, **kwargs)
        except Reached:
            returned = None
        finally:
            this_run.reset(token)
        check_noted(run)
        written = [key for key, version in self._versions(copies).items() if version != versions[key]]
        if written:
            raise PartitionError(
                f"the model's own forward writes its buffer {written[0]!r}, which it did not on the sample, and each "
                "part would write it again. Move it into a module of its own."
            )
        return returned

    def _versions(self, copies: Mapping[str, nn.Module]) -> dict[str, int]:
        """The versions of the buffers of modules that contain blocks, by name."""
        return {
            f"{name}.{key}" if name else key: _version(buffer)
            for name in self.settings for key, buffer in copies[name]._buffers.items() if buffer is not None
        }  # fmt: skip

    def call(
        self, number: int, hidden: tuple[Any, ...], kept: tuple[Any, ...], travelling: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any], Switches]:
        """The arguments of a block, args and kwargs, and the switches with which the model calls it."""
        chain, device = chain_of(self.chains, number), next(leaf.device for leaf in hidden if leaf is not None)
        carried = [(key, kept[index]) for key, index in chain.carried[number - chain.first]]
        call = self.beside(number, device, travelling)
        return *call.replaced([*zip(chain.entries, hidden, strict=True), *carried]), call.switches

    def beside(self, number: int, device: torch.device, travelling: tuple[Any, ...]) -> ModelCall:
        """The arguments of a block, with nan where the hidden state goes.

        One run finds it for all blocks of a chain. It is kept for the call, as long as the inputs live from which it
        was made.
        """
        end = chain_of(self.chains, number).last
        tensors = [leaf for leaf in travelling if isinstance(leaf, Tensor)]
        # In the thread and stream where it was made, it is ready.
        key = (
            end, device, threading.get_ident(), _stream(device), torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(), autocast_of(device),
            *[
                (id(leaf), _version(leaf)) if isinstance(leaf, Tensor) else leaf if type(leaf) is tuple else repr(leaf)
                for leaf in travelling
            ],
        )  # fmt: skip
        made = self._memory.made.get(key)
        if made is not None and all([one() is other for one, other in zip(made.inputs, tensors, strict=True)]):
            if made.versions != [tensor._version for tensor in made.tensors]:
                raise PartitionError(
                    "a block has written into a tensor that the model hands to several blocks. What comes later would "
                    "depend on which blocks share a stage; write to a copy."
                )
            return self.reached(made.calls, number)
        run = OutlineRun(self.chains, end)
        self.run(run, self.inputs.arrived(travelling, device), device, {})
        forget = partial(self._memory.made.pop, key, None)
        made_from = [weakref.ref(tensor, lambda _: forget()) for tensor in tensors]
        leaves = [leaf for call in run.calls for leaf in tree_leaves((call.args, call.kwargs))]
        counted = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()}
        versions = [leaf._version for leaf in counted.values()]
        with self._memory.lock:
            self._memory.made[key] = _Made(made_from, run.calls, list(counted.values()), versions)
            forget_oldest(self._memory.made)
        return self.reached(run.calls, number)

    def reached(self, calls: Sequence[ModelCall], number: int) -> ModelCall:
        """The call of a block in a run.

        Raises:
            PartitionError: the run ended before.
        """
        if number >= len(calls):
            name = [name for chain in self.chains for name in chain.blocks][number]
            raise PartitionError(
                f"the model's forward ended before it called block {name!r}, which it called on the sample with which "
                "it was cut. How many blocks it calls must not depend on what they compute; otherwise cut it with a "
                "sample that is like this call."
            )
        return calls[number]

    def begin_call(self) -> None:
        """Forget what was made in an earlier call: it was made of the inputs, and of the model as it was then."""
        with self._memory.lock:
            self._memory.made.clear()
            if self._following.follow():
                self._roots = {None: self._roots[None]}

    def _on(self, device: torch.device) -> nn.Module:
        """The root, with its buffers on a device."""
        if device not in self._roots:
            self._roots[device] = rebuilt(self._roots[None], lambda tensor: _moved(tensor, device))
        return self._roots[device]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; without memory there where it has none here."""
    return TensorShape.of(tensor).poison(device) if is_without_memory(tensor) else tensor.to(device)


def _outlined(
    module: nn.Module,
    replaced: Mapping[str, nn.Module],
    containers: set[str],
    name: str,
    volatile: Volatile,
    known: dict[int, nn.Module],
) -> nn.Module:
    """A copy without numbers of parameters of a module that contains blocks.

    Args:
        known: the copies that there are, of modules in it too, by the module's id.
    """
    if id(module) in known:
        return known[id(module)]
    made = known[id(module)] = shallow(module, volatile)
    vars(made)["training"] = False
    vars(made)["_parameters"] = {
        key: None if each is None else TensorShape.of(each).poison(each.device)
        for key, each in module._parameters.items()
    }
    vars(made)["_buffers"] = {
        key: TensorShape.of(each).poison(each.device) if isinstance(each, MadeUp) else each
        for key, each in module._buffers.items()
    }
    for key in references_of(made):
        del vars(made)[key]  # they would be those of when the model was cut
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if path in replaced:
            made._modules[key] = replaced[path]
        elif child is not None and path in containers:
            made._modules[key] = _outlined(child, replaced, containers, path, volatile, known)
        elif child is not None:
            made._modules[key] = _copied(child, volatile, known)
    return made


def _copied(module: nn.Module, volatile: Volatile, known: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module without parameters, in eval mode, which shares the buffers that no forward writes."""
    shared = {
        id(buffer): buffer for each in module.modules() for key, buffer in each._buffers.items()
        if buffer is not None and (id(each), key) not in volatile
    }
    made = copy.deepcopy(module, shared).eval()
    known.update((id(one), other) for one, other in zip(module.modules(), made.modules(), strict=True))
    return made


def _put_in(root: nn.Module, own: Mapping[str, Any], modes: Mapping[str, bool]) -> dict[str, nn.Module]:
    """The root with some modules and parameters put in, and copies of what contains them, in their modes: by name."""
    copies, made = {"": shallow(root)}, dict[int, nn.Module]()
    for name, training in modes.items():
        _copy(name, copies, made)
        vars(copies[name])["training"] = training
    for name, each in own.items():
        above, _, key = name.rpartition(".")
        _copy(above, copies, made)
        tables = [vars(copies[above])[table] for table in ("_parameters", "_buffers", "_modules")]
        next(table for table in tables if key in table)[key] = each
    return copies


def _copy(name: str, copies: dict[str, nn.Module], made: dict[int, nn.Module]) -> None:
    """Put a copy of a module into the copy of what contains it; of a block's stand-in it is what that shows.

    Args:
        name: of the module.
        copies: those that there are, by name.
        made: the same, by the id of the module: it may have several names.
    """
    if name in copies:
        return
    above, _, key = name.rpartition(".")
    _copy(above, copies, made)
    table: dict[str, Any] = copies[above]._modules
    own = table[key]
    if id(own) not in made:
        made[id(own)] = shallow(own)
        if isinstance(own, StandIn):
            made[id(own)]._modules["shadow"] = shallow(own.shadow)
    table[key] = found = made[id(own)]
    copies[name] = found.shadow if isinstance(found, StandIn) else found


def _lasting(module: nn.Module, volatile: Volatile) -> dict[str, Any]:
    """The attributes of a module that no forward sets."""
    others = OF_EVERY_MODULE | references_of(module).keys()
    own = {key: value for key, value in vars(module).items() if key not in others}
    return {key: value for key, value in own.items() if (id(module), key) not in volatile} | behaviour_of(module)


def _stream(device: torch.device) -> int:
    return 0 if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device).stream_id


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
