"""The shares of the parts of a model: the modules and parameters that each uses beside the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from partition.calls import run_model
from partition.errors import PartitionError
from partition.outline import Chain, MadeUp


class Phases(NamedTuple):
    """The phases in which things are used: 0 before the first chain, 1 within it, 2 after it, 3 within the next, ...

    Attributes:
        called: by the name of a module.
        read: by a storage.
    """

    called: dict[str, set[int]]
    read: dict[int, set[int]]


def phases_of(model: nn.Module, sample: Any, always: Mapping[str, Any], chains: Sequence[Chain]) -> Phases:
    """Run the model, and note what it uses when."""
    now, found = [0], Phases({}, {})

    def at(phase: int) -> Callable[..., None]:
        return lambda *_: now.__setitem__(0, phase)

    def note(name: str) -> Callable[..., None]:
        return lambda *_: found.called.setdefault(name, set()).add(now[0])

    with ExitStack() as stack, torch.no_grad():
        for number, chain in enumerate(chains):
            begin, end = model.get_submodule(chain.blocks[0]), model.get_submodule(chain.blocks[-1])
            stack.callback(begin.register_forward_pre_hook(at(2 * number + 1)).remove)
            stack.callback(end.register_forward_hook(at(2 * number + 2)).remove)
        for name, module in model.named_modules(remove_duplicate=False):
            stack.callback(module.register_forward_pre_hook(note(name)).remove)
        stack.enter_context(_Reading(lambda leaf: found.read.setdefault(_storage(leaf), set()).add(now[0])))
        run_model(model, sample, always)
    return found


def shares_of(model: nn.Module, chains: Sequence[Chain], phases: Phases) -> tuple[list[dict[str, Any]], list[str]]:
    """The shares of the parts that are no blocks, in order; and the modules with parameters among them."""
    shares: list[dict[str, Any]] = [{} for _ in range(len(chains) + 1)]
    apart = []
    units = dict(_units(model, "", {name for chain in chains for name in chain.blocks}))
    modules = {name: unit for name, unit in units.items() if isinstance(unit, nn.Module)}
    for name, unit in units.items():
        used = _used(name, unit, modules, phases)
        has_parameters = name in modules and (
            any(True for _ in modules[name].parameters())
            or any(isinstance(buffer, MadeUp) for buffer in modules[name].buffers())
        )
        if has_parameters:
            apart.append(name)
            if any(phase % 2 for phase in phases.called.get(name, ())):
                raise PartitionError(
                    f"module {name!r} is called between blocks, and belongs to none. Name blocks that contain it: "
                    "blocks=[...]."
                )
        owners = {phase // 2 for phase in used if phase % 2 == 0}
        if not owners and (has_parameters or name not in modules or modules[name].state_dict()):
            owners = {phase // 2 for phase in used} or {len(chains)}  # handed to blocks from before; or unused
        for owner in owners:
            shares[owner][name] = unit
    return shares, apart


def _used(name: str, unit: nn.Module | Tensor, modules: Mapping[str, nn.Module], phases: Phases) -> set[int]:
    """The phases in which something is used: called, or read where none that has the same parameters is called."""
    tensors = [unit] if isinstance(unit, Tensor) else list(unit.parameters())
    storages = {_storage(tensor) for tensor in tensors}
    read = {phase for storage in storages for phase in phases.read.get(storage, ())}
    if name not in modules:
        return read
    sharing = [
        other for other, module in modules.items() if storages & {_storage(each) for each in module.parameters()}
    ]  # fmt: skip
    inner = [found for other, found in phases.called.items() if f"{other}.".startswith(f"{name}.")]
    called = {phase for found in inner for phase in found}
    return called | {phase for phase in read if not any(phase in phases.called.get(other, ()) for other in sharing)}


def _units(model: nn.Module, name: str, blocks: set[str]) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """All but the blocks: parameters and buffers of the modules that contain blocks, and their other children."""
    for key, each in [*model._parameters.items(), *model._buffers.items()]:
        if each is not None and key not in model._non_persistent_buffers_set:
            yield f"{name}{key}", each
    for key, child in model._modules.items():
        path = f"{name}{key}"
        if child is None or path in blocks:
            continue
        if any(block.startswith(f"{path}.") for block in blocks):
            yield from _units(child, f"{path}.", blocks)
        else:
            yield path, child


class _Reading(TorchDispatchMode):
    """Notes the storages that operations are given."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for leaf in tree_iter((args, kwargs or {})):
                if isinstance(leaf, Tensor):
                    self._note(leaf)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
