"""The switches of torch, of a thread or of the process, that decide what a layer computes, as they were at the forward.

    F:  Ambient.capture()            autocast, default dtype, attention kernels, torch-function and dispatch modes
    R:  with ambient.entered(...):   the same again, then back to what was found

A default device is a torch-function mode too (`torch.set_default_device`, `with torch.device(...)`), so it is covered.
Hooks of all modules (`register_module_forward_hook`) belong to the process. Training flags and other hooks belong to
modules and are kept by the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from partition.precision import OPERATIONS, precision_switch
from pipeline.common.errors import PLAIN

_T = TypeVar("_T")
_get_function_state: Callable[[], Any] = getattr(torch._C, "_get_torch_function_state")  # torch's stubs lack both
_set_function_state: Callable[[Any], None] = getattr(torch._C, "_set_torch_function_state")
_CHECKPOINTS = ("torch.utils.checkpoint", "pipeline.recompute.saved_tensors")


class Ambient(NamedTuple):
    """torch's switches at one moment, in this thread."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    switches: tuple[Any, ...]  # of the whole process, in the order of _SWITCHES
    function_state: Any  # whether modes and subclasses of tensors act: not in the backward() of a loss of a subclass
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    saved_tensors_hooks: tuple[Any, Any] | None  # those of a checkpoint count what its own forward saves: None

    @classmethod
    def capture(cls, device_types: Iterable[str]) -> Ambient:
        """The switches as they are now; autocast is kept for each of `device_types`."""
        return cls(
            tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types]),
            torch.is_autocast_cache_enabled(),
            switches(),
            _get_function_state(),
            tuple(_get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else (),
            tuple(_get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else (),
            None if within_checkpoint() else torch._C._autograd._top_saved_tensors_default_hooks(False),
        )

    def now(self) -> Ambient:
        """The switches of the same device types, as they are now."""
        return Ambient.capture([kind for kind, _, _ in self.autocast])

    @contextmanager
    def entered(self, whole_process: bool) -> Iterator[None]:
        """Make the thread's switches what they were at the capture; at the end, what they were found as.

        Args:
            whole_process: do the same with those of the process. Other threads must not compute meanwhile.
        """
        present = self.now()
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                )
            if whole_process:
                stack.enter_context(_switched(self.switches))
            if present.saved_tensors_hooks != self.saved_tensors_hooks:
                hooks = self.saved_tensors_hooks or (as_it_is, as_it_is)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            if present.function_state != self.function_state:
                stack.callback(_set_function_state, present.function_state)
                _set_function_state(self.function_state)
            if present.function_modes != self.function_modes:
                stack.enter_context(_function_modes(self.function_modes))
            if present.dispatch_modes != self.dispatch_modes:
                stack.enter_context(_dispatch_modes(self.dispatch_modes))
            yield


_PLAIN_MODULE = (
    f"a Pipe runs its layers in threads, ranks and chunks. Give {PLAIN} to what needs a whole graph, or compile single "
    "layers before Pipe(...)."
)


def eagerly(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function that torch.compile must not trace: it would trace the engine instead of the layers.

    torch.compile of a layer works as usual; that of a whole Pipe compiles nothing.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is being compiled, and importing it takes a second
        return function(*args)
    opaque: Callable[..., _T] | None = getattr(function, "opaque", None)
    if opaque is None:
        opaque = torch.compiler.disable(function, reason=_PLAIN_MODULE)
        setattr(function, "opaque", opaque)
    return opaque(*args)


def without_function_modes() -> AbstractContextManager[None]:
    """Within: torch-function modes, which are meant for the layers, do not see the Pipe's own computations."""
    return _function_modes(()) if torch._C._len_torch_function_stack() else nullcontext()


@contextmanager
def without_counting_modes() -> Iterator[None]:
    """Within: of torch-function and dispatch modes only a default device is on."""
    devices = tuple([mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)])
    with _function_modes(devices), _dispatch_modes(()):
        yield


@contextmanager
def outside_vmap() -> Iterator[None]:
    """Within: outside of the vmap in which torch.autograd.grad(is_grads_batched=True) runs a backward.

    Only the gradients are batched, and layers that are recomputed may draw random numbers, which vmap refuses.
    """
    levels = torch._C._vmapmode_increment_nesting()
    while torch._C._vmapmode_decrement_nesting() > 0:
        pass
    try:
        yield
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()


def within_checkpoint() -> bool:
    """Whether a checkpoint, ours of a block or torch's, counts what is saved in this thread, in the order of saving."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) in _CHECKPOINTS


def _matmul_precision() -> str | None:
    """torch.get_float32_matmul_precision(), or None where the backends' switches differ.

    Read from them, since torch's function raises in that case.
    """
    precisions = [torch._C._get_fp32_precision_getter(backend, "matmul") for backend in ("cuda", "mkldnn")]
    return {"none none": "highest", "ieee ieee": "highest", "tf32 tf32": "high", "tf32 bf16": "medium"}.get(
        " ".join(precisions)
    )


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch._C._set_float32_matmul_precision(precision)


def _hooks_of_all_modules() -> tuple[dict[int, Any], ...]:
    return tuple(map(dict, _HOOK_TABLES)) if any(_HOOK_TABLES) else ()


def _set_hooks_of_all_modules(hooks: tuple[dict[int, Any], ...]) -> None:
    for table, entries in zip(_HOOK_TABLES, hooks or [{}] * len(_HOOK_TABLES), strict=True):
        table.clear()  # it stays the same object, so handles stay valid
        table.update(entries)


_HOOK_TABLES: tuple[dict[int, Any], ...] = (
    module_hooks._global_forward_pre_hooks, module_hooks._global_forward_hooks,
    module_hooks._global_forward_hooks_with_kwargs, module_hooks._global_forward_hooks_always_called,
    module_hooks._global_backward_pre_hooks, module_hooks._global_backward_hooks,
)  # fmt: skip

# The switches of the process that change what a layer computes, or its gradient: how to read and set each.
# A precision that is not set for an operation is that of its backend, or of all; so those come first. They are set by
# what torch's own functions call, as it is now: these settings are none that a layer makes (touches.py).
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch._C._set_default_dtype),
    (_hooks_of_all_modules, _set_hooks_of_all_modules),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_deterministic_algorithms, torch._C._set_deterministic_algorithms),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    *[precision_switch(backend, "all") for backend in ("generic", "cuda", "mkldnn")],
    (_matmul_precision, _set_matmul_precision),
    *OPERATIONS,
)

_GETTERS = tuple([get for get, _ in _SWITCHES])


def switches() -> tuple[Any, ...]:
    """The switches of the process, as they are now."""
    return tuple([get() for get in _GETTERS])


@contextmanager
def _switched(values: tuple[Any, ...]) -> Iterator[None]:
    previous = switches()
    try:
        switch(values)
        yield
    finally:
        switch(previous)


def switch(values: tuple[Any, ...]) -> None:
    """Set the switches of the process to what they were."""
    for (get, put), value in zip(_SWITCHES, values, strict=True):
        if get() != value:
            put(value)


def as_it_is(tensor: Any) -> Any:
    """A tensor, for a hook that packs nothing."""
    return tensor


def _function_modes(modes: tuple[Any, ...]) -> AbstractContextManager[None]:
    functions = torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack
    return _stack_of(modes, *functions, torch._C._push_on_torch_function_stack)


def _dispatch_modes(modes: tuple[Any, ...]) -> AbstractContextManager[None]:
    return _stack_of(modes, torch._C._len_torch_dispatch_stack, _pop_mode, _push_mode)


@contextmanager
def _stack_of(
    modes: tuple[Any, ...], length: Callable[[], int], pop: Callable[[], Any], push: Callable[[Any], object]
) -> Iterator[None]:
    previous = [pop() for _ in range(length())]
    for mode in modes:
        push(mode)
    try:
        yield
    finally:
        for _ in modes:
            pop()
        for mode in reversed(previous):
            push(mode)
