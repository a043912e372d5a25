"""Places: the devices on which stages compute, or, in tests, named parts of one.

    Pipe(..., devices=["cuda:0", "cuda:1"])    a place is a device: stages on one device share a place

Tests exercise several places (copies, a thread each, weights that another place owns) on the CPU alone: places with
different names count as different devices that share the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from pipeline.common.accelerators import is_accelerator
from pipeline.common.arguments import shown


class Place(NamedTuple):
    """A device; with a name, one of several that share a device.

    Example:
        >>> from torch import nn
        >>> from pipeline import Pipe
        >>> from pipeline.common.places import Place
        >>> cpu = torch.device("cpu")
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> pipe = Pipe(model, [1, 1], devices=[Place(cpu, "a"), Place(cpu, "b")])
        >>> pipe.devices
        [device(type='cpu'), device(type='cpu')]
    """

    device: torch.device
    name: str = ""

    def __str__(self) -> str:
        return f"{self.device} ({self.name})" if self.name else str(self.device)

    @property
    def is_accelerator(self) -> bool:
        return self.device.type != "cpu"


def places_for(devices: Any) -> list[Place] | None:
    """The places for a `devices` argument; None if none is given.

    Raises:
        TypeError, ValueError: no list of devices.
    """
    if devices is None:
        return None
    if isinstance(devices, str | bytes | Mapping | torch.Tensor | type) or not isinstance(devices, Iterable):
        raise TypeError(
            f"devices is {shown(devices)}. Give a list with the device of each stage, such as devices=['cpu', 'cpu']."
        )
    return [place_of(device) for device in devices]


def place_of(device: Place | torch.device | str | int) -> Place:
    """A device as tensors name theirs: with an index on accelerators, without on the CPU.

    Raises:
        TypeError, ValueError: it is none, or the meta device.
    """
    if isinstance(device, Place):
        torch_device = device.device
    elif isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"a device is {shown(device)}. Give torch.device(...), or its name, such as 'cpu' or 'cuda:0'.")
    else:
        try:
            torch_device = torch.device(device)  # a number: of an accelerator
        except RuntimeError as error:
            raise ValueError(f"a device is {device!r}, which torch does not know: {error}") from error
    if torch_device.type == "meta":
        raise ValueError(
            "a stage cannot compute on the meta device, where tensors have no values. Give devices that have memory; "
            "layers on the meta device get theirs there by Pipe(..., materialize=...)."
        )
    if isinstance(device, Place):
        return device
    if is_accelerator(torch_device) and torch_device.index is None:
        return Place(torch.device(torch_device.type, torch.accelerator.current_device_index()))
    return Place(torch.device("cpu")) if torch_device.type == "cpu" else Place(torch_device)
