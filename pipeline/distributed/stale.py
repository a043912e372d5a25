"""Marks on the modules of the caller's model that another rank trains: their values here are those of before.

    pipe = Pipe(model, ...)               over ranks: rank 1 has model[3]; this rank's copy stays as it is
    pipe.step(...), loss.backward()       from now on model[3] of this rank is marked
    model(x), model.state_dict()          RuntimeError; torch.save(model): TypeError
    Pipe(model, ...) with model[3] here   RuntimeError
    model.load_state_dict(state)          ends it, until the next step
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.jit import ScriptModule

_MARKS = "_stale_marks"
_REMEDY = (
    "which another rank trains: the values of this rank's model are those of before. Call state = "
    "pipe.full_state_dict() on all ranks, and model.load_state_dict(state) on rank 0, which gets it; "
    "torch.distributed.broadcast_object_list sends it to others. Or use the Pipe instead of the model."
)


class StaleMark:
    """The mark on the modules that one Pipe has left stale, and their hooks.

    It stands among a module's attributes. Hooks are not enough: parts of a model that `to_sequential` has cut have
    stand-ins for modules of other parts, which share the tables of hooks.

    Attributes:
        is_whole: whether all of them have it: none was loaded since.
    """

    def __init__(self) -> None:
        self.is_whole = False

    def __deepcopy__(self, memo: Any) -> StaleMark:
        """A copy of a model is as stale, and no Pipe marks it anew."""
        return StaleMark()

    def __reduce__(self) -> NoReturn:
        """A file with the values of before would be found out when it is read, or never."""
        raise TypeError(f"a module of the model cannot be pickled or saved, {_REMEDY}")

    def put_on(self, module: nn.Module) -> None:
        marks = marks_of(module)
        if self in marks:
            return
        vars(module)[_MARKS] = (*marks, self)
        if not any(map(is_mark, module._forward_pre_hooks.values())):
            module.register_forward_pre_hook(self.refuse_forward, prepend=True)
            module.register_state_dict_pre_hook(self.refuse_state_dict)
        if not any(map(is_mark, module._load_state_dict_pre_hooks.values())):
            module.register_load_state_dict_pre_hook(self.end)

    def refuse_forward(self, module: nn.Module, args: Any) -> None:
        if marks_of(module):
            raise RuntimeError(f"a module of the model ({type(module).__name__}) was called, {_REMEDY}")

    def refuse_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if marks_of(module):
            kind = type(module).__name__
            raise RuntimeError(f"state_dict() of a module of the model ({prefix.rstrip('.')!r}, {kind}), {_REMEDY}")

    def end(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Called as the module is loaded: end all marks if it is in the state."""
        if _keeps_nothing(module) or any(key.startswith(prefix) for key in state_dict):
            for mark in marks_of(module):
                mark.is_whole = False
            _lift(module)  # but for this hook: torch goes through its table now


class StaleModules:
    """The modules of the caller's model that this rank does not train, and that their Pipe marks as soon as it trains.

    Args:
        modules: they are not kept alive.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._mark = StaleMark()

    def __reduce__(self) -> tuple[type[StaleModules], tuple[()]]:
        """A copy of a Pipe has no model."""
        return StaleModules, ()

    def mark(self) -> None:
        """Mark those that are not, but for what is on the meta device."""
        if self._mark.is_whole:
            return
        self._mark.is_whole = True
        for reference in self._modules:
            module = reference()
            if module is not None and not all(tensor.is_meta for tensor in _tensors_of(module)):
                self._mark.put_on(module)


def trained_elsewhere(
    remote_layers: Iterable[nn.Module], own_layers: Iterable[nn.Module], model: nn.Module | None
) -> StaleModules:
    """The modules that hold a parameter or a buffer of other ranks' layers, and of no layer here.

    Those of torch.jit are left out: they take no hooks.

    Args:
        remote_layers: the other ranks' layers.
        own_layers: this rank's.
        model: the one of which they are parts, if there is one: they may hold copies of modules of its.
    """
    own_ids = {id(tensor) for layer in own_layers for module in layer.modules() for tensor in _tensors_of(module)}
    remote_modules = [
        module for layer in remote_layers for module in layer.modules() if not isinstance(module, ScriptModule)
    ]
    remote_ids = {id(tensor) for module in remote_modules for tensor in _tensors_of(module)} - own_ids
    modules = {id(module): module for module in [*remote_modules, *([] if model is None else model.modules())]}
    return StaleModules(
        [module for module in modules.values() if any(id(tensor) in remote_ids for tensor in _tensors_of(module))]
    )


def refuse_stale(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise if a module that a Pipe is to run is marked.

    Raises:
        RuntimeError: it is.
    """
    for name, module in named:
        if marks_of(module):
            raise RuntimeError(f"a Pipe is built with {name!r} ({type(module).__name__}), {_REMEDY}")


@contextmanager
def without_marks(module: nn.Module) -> Iterator[None]:
    """Within: no module in this one is marked."""
    marked = [(submodule, marks_of(submodule)) for submodule in module.modules()]
    try:
        for submodule, marks in marked:
            if marks:
                _lift(submodule)
        yield
    finally:
        for submodule, marks in marked:
            for mark in marks:
                mark.put_on(submodule)


def marks_of(module: nn.Module) -> tuple[StaleMark, ...]:
    """The marks on a module: one of each Pipe that has left it stale."""
    marks: tuple[StaleMark, ...] = vars(module).get(_MARKS, ())
    return marks


def is_mark(hook: Any) -> bool:
    """Whether a hook is one of those that are put here."""
    return isinstance(getattr(getattr(hook, "hook", hook), "__self__", None), StaleMark)


def _lift(module: nn.Module) -> None:
    vars(module).pop(_MARKS, None)
    tables: list[MutableMapping[int, Any]] = [module._forward_pre_hooks, module._state_dict_pre_hooks]
    for table in tables:
        for key in [key for key, hook in table.items() if is_mark(hook)]:
            del table[key]


def _keeps_nothing(module: nn.Module) -> bool:
    """Whether nothing of its own stands in its state."""
    return not any(tensor is not None for tensor in module._parameters.values()) and all(
        name in module._non_persistent_buffers_set for name, buffer in module._buffers.items() if buffer is not None
    )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself."""
    tables = (module._parameters, module._buffers)
    return [tensor for table in tables for tensor in table.values() if tensor is not None]
