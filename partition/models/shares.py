"""The shares of the parts of a model: the modules and parameters that each uses beside the blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from partition.contents import storage_of
from partition.errors import PartitionError
from partition.models.calls import ModelRun
from partition.models.chains import outermost_calls
from partition.models.runs import BlockChain, names_of, numbers_of
from partition.models.shapes import MadeUpBuffer
from partition.models.stand_ins import VolatileAttributes


class Phases(NamedTuple):
    """The phases in which things are used: 0 before the first chain, 1 within it, 2 after it, 3 within the next, ...

    Attributes:
        called: by the name of a module.
        read: by a storage.
    """

    called: dict[str, set[int]]
    read: dict[int, set[int]]

    def add(self, part: int, unit: nn.Module | Tensor) -> None:
        """Let a part, 0 before the first chain, read a parameter, or those of a module."""
        for storage in _storages_of(unit):
            self.read[storage].add(2 * part)


def phases_of(model: nn.Module, runs: Iterable[ModelRun], chains: Sequence[BlockChain]) -> Phases:
    """The phases in which a model used things, in some runs; but for calls within a block of what that contains."""
    phases = Phases(defaultdict(set), defaultdict(set))
    names = names_of(model)
    contents = {block: set(model.get_submodule(block).modules()) for chain in chains for block in chain.blocks}
    for calls, flow, *_ in runs:
        block_calls = outermost_calls(calls, contents)
        ends = [time for chain in chains for time in (block_calls[chain.first].begin, block_calls[chain.last].end)]
        begins = [block.begin for block in block_calls]
        for call in calls:
            module, number = model.get_submodule(call.name), bisect_right(begins, call.begin) - 1
            is_in_block = number >= 0 and call.begin < block_calls[number].end
            if is_in_block and module in contents[block_calls[number].name]:
                continue
            for name in names[id(module)]:
                phases.called[name].add(bisect_right(ends, call.begin))
        for time, nodes in [*[(node.time, node.parents) for node in flow.nodes], *flow.host_reads]:
            for node in map(flow.computed, nodes):
                if node in flow.roots:
                    phases.read[flow.roots[node]].add(bisect_right(ends, time))
    return phases


def shares_of(
    model: nn.Module, chains: Sequence[BlockChain], phases: Phases, volatile: VolatileAttributes
) -> tuple[list[dict[str, Any]], list[str]]:
    """The shares of the parts that are no blocks, in order; and the modules that others have absent.

    A module within a block that the model calls too is in the shares of the parts that call it. Absent elsewhere are
    modules with parameters, and those that write buffers: a copy would have other numbers there.

    Raises:
        PartitionError: a module is called within a chain, or several parts would write its buffers.
    """
    shares: list[dict[str, Any]] = [{} for _ in range(len(chains) + 1)]
    part_names = []
    units = dict(_units(model, "", numbers_of(model, chains)))
    inner_modules = _called_from_without(model, chains, phases, units)
    units.update(inner_modules)
    modules = {name: unit for name, unit in units.items() if isinstance(unit, nn.Module)}
    for name, unit in units.items():
        phases_used = _used(name, unit, modules, phases)
        writes = [f"{name}.{key}" for key in _written_buffers(modules[name], volatile)] if name in modules else []
        is_single = bool(writes) or name in modules and (
            any(True for _ in modules[name].parameters())
            or any(isinstance(buffer, MadeUpBuffer) for buffer in modules[name].buffers())
        )
        if is_single:
            part_names.append(name)
            if name not in inner_modules and any(phase % 2 for phase in phases.called.get(name, ())):
                raise PartitionError(
                    f"module {name!r} is called between blocks, and belongs to none. Name blocks that contain it: "
                    "to_sequential(model, sample, blocks=[...])."
                )
        owners = {phase // 2 for phase in phases_used if phase % 2 == 0}
        if is_single or name not in modules or modules[name].state_dict():
            first = min(owners, default=len(chains))  # handed to blocks before that, from before them; or unused
            owners |= {phase // 2 for phase in phases_used if phase < 2 * first} or {first}
        if len(owners) + (name in inner_modules) > 1 and writes:
            raise PartitionError(
                f"module {name!r} is called in several parts of the model, and writes its buffer {writes[0]!r}: each "
                "part would write it for those before it, too. Let a module of its own stand in each place, or call it "
                "once, with a tensor: then it is a layer."
            )
        for owner in owners:
            shares[owner][name] = unit
    return shares, part_names


def _called_from_without(
    model: nn.Module, chains: Sequence[BlockChain], phases: Phases, units: Mapping[str, nn.Module | Tensor]
) -> dict[str, nn.Module]:
    """The modules within blocks that the model itself calls, before or after their chain: blocks[0].embed(y)."""
    known_ids = {
        id(module) for unit in units.values() if isinstance(unit, nn.Module) for module in unit.modules()
    }  # fmt: skip
    inner_modules: dict[str, nn.Module] = {}
    for block in dict.fromkeys(block for chain in chains for block in chain.blocks):
        for key, module in model.get_submodule(block).named_modules(prefix=block):
            is_called = any(phase % 2 == 0 for phase in phases.called.get(key, ()))
            if is_called and key != block and id(module) not in known_ids:
                known_ids.update(map(id, module.modules()))  # the largest, as it comes before what is in it
                inner_modules[key] = module
    return inner_modules


def _written_buffers(unit: nn.Module, volatile: VolatileAttributes) -> list[str]:
    paths = [name.rpartition(".") for name, _ in unit.named_buffers(remove_duplicate=False)]
    return ["".join(path) for path in paths if (id(unit.get_submodule(path[0])), path[2]) in volatile]


def _used(name: str, unit: nn.Module | Tensor, modules: Mapping[str, nn.Module], phases: Phases) -> set[int]:
    """The phases in which something is used: called, or read where none that has the same parameters is called."""
    storages = _storages_of(unit)
    read = {phase for storage in storages for phase in phases.read.get(storage, ())}
    if name not in modules:
        return read
    sharing = [other for other, module in modules.items() if storages & _storages_of(module)]
    inner = [phase_set for inner_name, phase_set in phases.called.items() if f"{inner_name}.".startswith(f"{name}.")]
    called = {phase for phase_set in inner for phase in phase_set}
    return called | {phase for phase in read if not any(phase in phases.called.get(other, ()) for other in sharing)}


def _storages_of(unit: nn.Module | Tensor) -> set[int]:
    tensors = [unit] if isinstance(unit, Tensor) else [*unit.parameters(), *unit.buffers()]
    return {storage_of(tensor) for tensor in tensors}


def unit_of(model: nn.Module, name: str) -> nn.Module | Tensor:
    """The module, parameter or buffer of a name."""
    parent, _, key = name.rpartition(".")
    unit: nn.Module | Tensor = getattr(model.get_submodule(parent), key)
    return unit


def _units(model: nn.Module, name: str, blocks: Collection[str]) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """All but the blocks: parameters and buffers of the modules that contain blocks, and their other children."""
    for key, tensor in [*model._parameters.items(), *model._buffers.items()]:
        if tensor is not None and key not in model._non_persistent_buffers_set:
            yield f"{name}{key}", tensor
    for key, child in model._modules.items():
        path = f"{name}{key}"
        if child is None or path in blocks:
            continue
        if any(block.startswith(f"{path}.") for block in blocks):
            yield from _units(child, f"{path}.", blocks)
        else:
            yield path, child
