"""Where does a stage compute?

    Pipe(..., devices=["cuda:0", "cuda:1"])    a place is a device: what shares a device shares a place

What several places need (copies, a thread each, weights that are read far from home) can be had on the CPU alone:
places of other names count as other devices, which happen to share the processor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Place(NamedTuple):
    """A device; with a name, one of several that share a device.

    Example:
        >>> from torch import nn
        >>> from pipeline import Pipe
        >>> from pipeline.places import Place
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


def place_of(device: Place | torch.device | str | int) -> Place:
    """A device as tensors name theirs: with an index on CUDA, without on the CPU."""
    if isinstance(device, Place):
        return device
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return Place(torch.device("cuda", torch.cuda.current_device()))
    return Place(torch.device("cpu")) if found.type == "cpu" else Place(found)
