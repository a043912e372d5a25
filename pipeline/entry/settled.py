"""A module that stays as it was built: it refuses to be moved to another device, recorded, or reconfigured.

    pipe.to(torch.float64)             cast, as nn.Module.to
    pipe.to("cuda:1"), parent.cuda()   TypeError, where any tensor of it would move; else nothing
    pipe.devices = [...]               AttributeError: build another one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from pipeline.common.errors import PLAIN
from pipeline.distributed.remote_layer import RemoteLayer

_BUILT_WITH = frozenset([
    "balance", "devices", "batch_dim", "workers", "group", "replicas", "timeout", "heartbeat", "materialize",
])  # fmt: skip


class FixedModule(nn.Module):
    """The operations of nn.Module that a Pipe refuses."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _BUILT_WITH:
            raise AttributeError(
                f"{name} cannot be set: the Pipe was built with it. Build another Pipe of the nn.Sequential, "
                f"with {name}=..., or set pipe.chunks, pipe.schedule, pipe.checkpoint or pipe.deferred_batch_norm."
            )
        own = getattr(type(self), name, None)
        if isinstance(own, property):  # nn.Module would take a module for a layer
            if own.fset is None:
                raise AttributeError(
                    f"{name} cannot be set: it follows from the balance and the devices that the Pipe was built with. "
                    "It has placed its stages itself, so do not give it to what places modules (dispatch_model)."
                )
            object.__setattr__(self, name, value)
        else:
            _refuse_in_place_of_remote(self, name)
            super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As nn.Module's; over ranks a layer is replaced on the rank that has it.

        Raises:
            AttributeError: another rank has the layer of this name.
        """
        _refuse_in_place_of_remote(self, name)
        super().add_module(name, module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by `.to`, `.cuda`, `.half` and the like, also by those of a module around this one.

        Raises:
            TypeError: a tensor would move to another device.
        """
        devices = {tensor.device for tensors in (self.parameters(), self.buffers()) for tensor in tensors}
        for device in devices:
            target = fn(torch.empty(0, device=device)).device
            if target != device:
                raise TypeError(
                    f"a Pipe places its stages itself, so what it has on {device} does not move to {target}. Give "
                    f"Pipe(..., devices=[...]), or take {PLAIN}."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script: refused."""
        refuse_recording("torch.jit.script")


def _refuse_in_place_of_remote(module: nn.Module, name: str) -> None:
    layers: Mapping[str, Any] = vars(module).get("_modules", {})  # there are none while it is built
    layer = layers.get(name)
    if isinstance(layer, RemoteLayer):
        layer.refuse_another()


_RECORDERS: dict[str, Callable[[], bool]] = {
    "torch.jit.trace": torch.jit.is_tracing,
    "torch.export.export": torch.compiler.is_exporting,
    "torch.fx.symbolic_trace": torch.fx._symbolic_trace.is_fx_symbolic_tracing,
}


def refuse_recorders() -> None:
    """Raise where a tool is recording this call."""
    for tool, is_recording in _RECORDERS.items():
        if is_recording():
            refuse_recording(tool)


def refuse_recording(tool: str) -> NoReturn:
    """Raise: a tool would record the engine instead of the layers."""
    raise TypeError(
        f"{tool} cannot record a Pipe, which runs its layers in threads, ranks and chunks. Record {PLAIN}, or single "
        "layers before Pipe(...)."
    )
