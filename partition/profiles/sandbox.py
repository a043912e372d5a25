"""A sandbox for layers: copies on a device, or without numbers, so that nothing of the caller's is changed.

    layer --deep copy--> on the device                 sample --copy--> on the device
          --deep copy--> of fake tensors ("meta")             --------> fake tensors

A fake tensor has shape, dtype and device, and no memory (torch's FakeTensor). Unlike one on the meta device it tells
code that asks where it is, so that the kernels of that device are chosen, and what these save is counted.
"""

import copy
import pickle
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partition.contents import rewrapped, with_attributes, wraps
from partition.errors import PartitionError
from partition.models.outline import Outline
from partition.models.parts import Part
from partition.randomness import generators_left
from partition.splitting import check_shaped

DeviceLike = torch.device | str | int | None


def device_of(module: nn.Module, device: DeviceLike) -> torch.device:
    """The device to run layers on: the one that is given, or that of the parameters, or the CPU.

    Raises:
        PartitionError: torch has no such device here.
    """
    if device is not None:
        found = device_named(device)
        try:
            torch.empty(0, device=found)
        except (AssertionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise PartitionError(f"layers cannot run on {found} here: {reason}. Give cpu, or meta.") from None
        return found
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def device_named(device: torch.device | str | int) -> torch.device:
    """torch's device of that name; PartitionError where there is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise PartitionError(f"{device!r} is no device: {reason}. Give a name such as cpu, cuda:0 or meta.") from None


class Sandbox:
    """Copies of layers and inputs on a device.

    Args:
        device: "meta" makes fakes, which stand on the accelerator if there is one, or else on the CPU.

    Attributes:
        device: where copies are, or, of fakes, seem to be.
        fake: whether they are fakes.
    """

    def __init__(self, device: torch.device) -> None:
        self.fake = device.type == "meta"
        accelerator = torch.accelerator.current_accelerator(check_available=True) if self.fake else device
        self.device = accelerator or torch.device("cpu")
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._outlines: dict[int, Outline] = {}

    @contextmanager
    def within(self) -> Iterator[None]:
        """Within: gradients are on, and the default random generators are left as they were."""
        devices = [] if self.fake else [self.device]
        with torch.inference_mode(False), torch.enable_grad(), generators_left(devices):
            yield

    def running(self) -> AbstractContextManager[object]:
        """Within: of fakes fakes are made."""
        return self._mode if self.fake else nullcontext()

    def __str__(self) -> str:
        return "meta" if self.fake else str(self.device)

    def now(self) -> float:
        """Seconds of a clock, once the device has done what it was given."""
        torch.get_device_module(self.device).synchronize(self.device)  # does nothing on the CPU
        return time.perf_counter()

    def copy(self, layer: nn.Module) -> nn.Module:
        """A copy of a layer; of a part of a model its own, with an outline that is not the caller's.

        Raises:
            PartitionError: it has no numbers, and is to run with numbers; is lazy, and is to run without; or holds
                what cannot be copied.
        """
        memo: dict[int, Any] = {}
        for part in layer.modules():
            if isinstance(part, Part):
                outline = part.outline
                memo[id(outline)] = self._outlines.setdefault(id(outline), outline.alone())
        for tensor in pytree.tree_iter([vars(module) for module in layer.modules()]):
            if isinstance(tensor, Tensor) and not tensor.is_leaf:  # an activation that a forward has left
                memo[id(tensor)] = self._moved(tensor.detach())
        if self.fake:
            check_shaped(layer)
            for tensor in (*layer.parameters(), *layer.buffers()):
                memo[id(tensor)] = self._fake(tensor)
            return self._with_attributes(_copied(layer, memo), layer)
        bare = [name for name, tensor in (*layer.named_parameters(), *layer.named_buffers()) if tensor.is_meta]
        if bare:
            raise PartitionError(
                f"{', '.join(bare[:5])} {'is' if len(bare) == 1 else 'are'} on the meta device, so there are no "
                f"numbers to compute with on {self.device}. Use device='meta', which counts bytes and FLOPs without."
            )
        return self._with_attributes(_copied(layer, memo).to(self.device), layer)

    def _with_attributes(self, layer_copy: nn.Module, layer: nn.Module) -> nn.Module:
        """The copy of a layer, whose parameters and buffers get copies of what is set on the layer's."""
        copies = _tensors_of(layer_copy)
        for name, tensor in _tensors_of(layer).items():
            if vars(tensor) and name in copies:
                with_attributes(copies[name], tensor, self.moved)
        return layer_copy

    def moved(self, value: Any) -> Any:
        """A copy of all tensors of a value, which need gradients as they did."""
        return pytree.tree_map_only(Tensor, self._moved, value)

    def _moved(self, tensor: Tensor) -> Tensor:
        # Always a copy: a tensor that was made under inference_mode can be a leaf of no graph.
        if tensor.is_meta and not self.fake:
            raise PartitionError(
                f"a tensor of shape {list(tensor.shape)} is on the meta device, so there are no numbers to compute "
                f"with on {self.device}. Give a sample with numbers; or device='meta', which counts bytes and FLOPs."
            )
        moved = self._fake(tensor) if self.fake else tensor.detach().to(self.device, copy=True)
        return moved.requires_grad_(tensor.requires_grad)

    def _fake(self, tensor: Tensor) -> Tensor:
        if wraps(tensor):
            fake = rewrapped(tensor, self._fake)
        else:
            size, stride = tensor.size(), tensor.stride()
            with self._mode:
                fake = torch.empty_strided(size, stride, dtype=tensor.dtype, device=self.device)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a layer, by their names."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _copied(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(layer, memo)
    except (TypeError, pickle.PicklingError) as error:  # as of a lock, a file, a process group
        raise PartitionError(
            f"{type(layer).__name__} holds what cannot be copied ({error}), and a profile runs a copy of each layer. "
            "Keep it outside of the module, or give the module's class a __deepcopy__ whose copies share it."
        ) from error
