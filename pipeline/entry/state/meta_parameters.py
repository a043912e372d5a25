"""Modules built without memory for what a state_dict has, but with the values that none has.

    with meta_parameters():                      parameters, persistent buffers     on the meta device
        model = LlamaForCausalLM(config)         other buffers: rotary tables       as they were computed

Under torch.device("meta") rotary tables and position ids, which no checkpoint has, would be without values too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from pipeline.entry.state.meta_tensors import become


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Within, modules are built with parameters on the meta device, and at the end all that a state_dict has is there.

    A parameter has memory while it is made, until a module has it: that of the largest one, at a time. Buffers with
    persistent=False and other tensors keep their values, since no state would give them any. The hooks are torch's
    global ones: in no thread should modules be built that are to keep theirs.

    Example:
        >>> with meta_parameters():
        ...     layer = nn.BatchNorm1d(2)
        ...     layer.register_buffer("table", torch.arange(3), persistent=False)
        >>> layer.weight.is_meta, layer.running_mean.is_meta, layer.table
        (True, True, tensor([0, 1, 2]))
    """
    with_buffers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def drop(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        _drop_memory(parameter)

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        with_buffers.add(module)  # whether a state_dict has it is not known yet

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(drop).remove)
        stack.callback(register_module_buffer_registration_hook(note).remove)
        yield
    for module in list(with_buffers):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                _drop_memory(buffer)


def _drop_memory(tensor: Tensor) -> None:
    if not tensor.is_meta and not is_lazy(tensor):
        become(tensor, torch.empty_like(tensor, device="meta"))
