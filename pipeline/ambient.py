"""What else decides what a layer computes? The switches that torch keeps per thread, as they were at the forward.

    F:  Ambient.capture()            autocast, default dtype, attention kernels, torch-function and dispatch modes
    R:  with ambient.entered():      the same again, then back to what was found

A default device is a torch-function mode too (`torch.set_default_device`, `with torch.device(...)`), so it is covered.
Training flags belong to modules and are kept by the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class Ambient(NamedTuple):
    """torch's switches at one moment, in this thread."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    attention: tuple[bool, ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]

    @classmethod
    def capture(cls, device_types: Iterable[str]) -> Ambient:
        """The switches as they are now; autocast is kept for each of `device_types`."""
        kinds = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types)
        return cls(
            tuple(kinds),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            _attention_kernels(),
            tuple(_get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else (),
            tuple(_get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else (),
        )

    def now(self) -> Ambient:
        """The switches of the same device types, as they are now."""
        return Ambient.capture(kind for kind, _, _ in self.autocast)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make every switch what it was at the capture; at the end, what it was found as."""
        now = self.now()
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                )
            stack.enter_context(_default_dtype(self.default_dtype))
            stack.enter_context(_attention(self.attention))
            if now.function_modes != self.function_modes:
                stack.enter_context(_function_modes(self.function_modes))
            if now.dispatch_modes != self.dispatch_modes:
                stack.enter_context(_dispatch_modes(self.dispatch_modes))
            yield


def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that torch.compile must not look into: it would trace the engine instead of the layers.

    torch.compile of a layer works as ever; of a whole Pipe, it compiles nothing.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is being compiled, and importing it takes a second
        return function(*args)
    return _opaque(function)(*args)


@cache
def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    opaque: Callable[..., Any] = torch.compiler.disable(function)
    return opaque


def _attention_kernels() -> tuple[bool, ...]:
    """Which kernels scaled_dot_product_attention may choose from: flash, math, memory-efficient, cuDNN."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _set_attention(kernels: tuple[bool, ...]) -> None:
    flash, math, efficient, cudnn = kernels
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_mem_efficient(efficient)
    torch._C._set_sdp_use_cudnn(cudnn)


@contextmanager
def _attention(kernels: tuple[bool, ...]) -> Iterator[None]:
    found = _attention_kernels()
    _set_attention(kernels)
    try:
        yield
    finally:
        _set_attention(found)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    found = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(found)


@contextmanager
def _function_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    found = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_function_stack()
        for mode in reversed(found):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def _dispatch_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    found = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in reversed(found):
            _push_mode(mode)
