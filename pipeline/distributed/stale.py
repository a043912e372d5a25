"""Marks on the modules of the caller's model that another rank trains: their values here are those of before.

    pipe = Pipe(model, ...)               over ranks: rank 1 has model[3]; this rank's copy stays as it is
    pipe.step(...), loss.backward()       from now on model[3] of this rank is marked
    model(x), model.state_dict()          RuntimeError; torch.save(model): TypeError
    model[3].weight gets a gradient       RuntimeError: the script has computed with it
    Pipe(model, ...) with model[3] here   RuntimeError
    model.load_state_dict(state)          ends it, until the next step
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.jit import ScriptModule

from partition.names import STALE_MARK

_REMEDY = (
    "which another rank trains: the values of this rank's model are those of before. Call state = "
    "pipe.full_state_dict() on all ranks, and model.load_state_dict(state) on rank 0, which gets it; "
    "torch.distributed.broadcast_object_list sends it to others. Or use the Pipe instead of the model."
)


class StaleMark:
    """The mark that stands among the attributes of a stale module, and by which its hooks know that it is one.

    Hooks are not enough: parts of a model that `to_sequential` has cut have stand-ins for modules of other parts, which
    share the tables of hooks. A copy of a module is as stale.
    """

    def __reduce__(self) -> NoReturn:
        """A file with the values of before would be found out when it is read, or never."""
        raise TypeError(f"a module of the model cannot be pickled or saved, {_REMEDY}")

    def __deepcopy__(self, memo: Any) -> StaleMark:
        return self


_MARK = StaleMark()


class StaleModules:
    """The modules of the caller's model that this rank does not train, and that their Pipe marks as soon as it trains.

    Args:
        modules: each with the parameters of its own that another rank trains. They are not kept alive.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, list[nn.Parameter]]] = ()) -> None:
        self._modules = [(weakref.ref(module), [*map(weakref.ref, parameters)]) for module, parameters in modules]

    def __reduce__(self) -> tuple[type[StaleModules], tuple[()]]:
        """A copy of a Pipe has no model."""
        return StaleModules, ()

    def mark(self) -> None:
        """Mark those that are not, but for what is on the meta device."""
        for reference, parameters in self._modules:
            module = reference()
            if module is None or is_stale(module) or all(tensor.is_meta for tensor in _tensors_of(module)):
                continue
            vars(module)[STALE_MARK] = _MARK
            if _refuse_forward not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_refuse_forward, prepend=True)
                module.register_state_dict_pre_hook(_refuse_state_dict)
                module.register_load_state_dict_pre_hook(_lift)
                for parameter in (held() for held in parameters):
                    if parameter is not None and parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(partial(_refuse_gradient, reference))


def _refuse_forward(module: nn.Module, args: Any) -> None:
    if is_stale(module):
        raise RuntimeError(f"a module of the model ({type(module).__name__}) was called, {_REMEDY}")


def _refuse_gradient(holder: weakref.ref[nn.Module], parameter: Tensor) -> None:
    module = holder()
    if module is not None and is_stale(module):
        names = [name for name, held in module.named_parameters(recurse=False) if held is parameter]
        raise RuntimeError(
            f"the script itself computed with a parameter of the model ({type(module).__name__}.{'/'.join(names)}), "
            f"{_REMEDY}"
        )


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if is_stale(module):
        kind = type(module).__name__
        raise RuntimeError(f"state_dict() of a module of the model ({prefix.rstrip('.')!r}, {kind}), {_REMEDY}")


def _lift(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """Called as a module is loaded: end its mark if it is in the state, or keeps nothing there."""
    if _keeps_nothing(module) or any(key.startswith(prefix) for key in state_dict):
        vars(module).pop(STALE_MARK, None)


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
        (module, [parameter for parameter in module.parameters(recurse=False) if id(parameter) in remote_ids])
        for module in modules.values()
        if any(id(tensor) in remote_ids for tensor in _tensors_of(module))
    )


def refuse_stale(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise if a module that a Pipe is to run is marked.

    Raises:
        RuntimeError: it is.
    """
    for name, module in named:
        if is_stale(module):
            raise RuntimeError(f"a Pipe is built with {name!r} ({type(module).__name__}), {_REMEDY}")


@contextmanager
def without_marks(module: nn.Module) -> Iterator[None]:
    """Within: no module in this one is marked."""
    marked = [submodule for submodule in module.modules() if is_stale(submodule)]
    try:
        for submodule in marked:
            del vars(submodule)[STALE_MARK]
        yield
    finally:
        for submodule in marked:
            vars(submodule)[STALE_MARK] = _MARK


def is_mark(hook: Any) -> bool:
    """Whether a hook for loading is the one that is put here."""
    return getattr(hook, "hook", hook) is _lift


def is_stale(module: nn.Module) -> bool:
    """Whether a module is marked."""
    return STALE_MARK in vars(module)


def _keeps_nothing(module: nn.Module) -> bool:
    """Whether nothing of its own stands in its state."""
    return not any(tensor is not None for tensor in module._parameters.values()) and all(
        name in module._non_persistent_buffers_set for name, buffer in module._buffers.items() if buffer is not None
    )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself."""
    tables = (module._parameters, module._buffers)
    return [tensor for table in tables for tensor in table.values() if tensor is not None]
