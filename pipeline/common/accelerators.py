"""Accelerators as torch.accelerator knows them: one path for CUDA, ROCm, XPU, NPU and any other kind.

    accelerators(), entered(device)      which there are; within: one is the current device
    entered_streams(stream, ...)         within: streams are current
    default_generators(devices)          what layers there draw from

A process has accelerators of one kind. Those of a kind without default generators that can be seeded (MPS: one device,
one stream) are treated as the host is: plain copies, no streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether this is a device with streams and a generator of its own."""
    return device.type != "cpu" and device.type == _kind()


def accelerators() -> list[torch.device]:
    """All accelerators that this process sees."""
    kind = _kind()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def entered(device: torch.device) -> torch.accelerator.device_index:
    """A context. Within: this accelerator is the current one; for the host nothing changes."""
    return torch.accelerator.device_index(device.index if is_accelerator(device) else None)


@contextmanager
def entered_streams(*streams: torch.Stream) -> Iterator[None]:
    """Within: these streams are the current ones of their devices. In any thread, as often as one likes.

    A `torch.Stream` as a context cannot be entered by two threads at a time.
    """
    device = torch.accelerator.current_device_index()
    found = [torch.accelerator.current_stream(stream.device) for stream in streams]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in found:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)


def default_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of those of `devices` that are accelerators."""
    kind = _kind()
    indices = sorted({device.index or 0 for device in devices if device.type == kind})
    if kind is None or not indices:
        return []
    torch.accelerator.current_device_index()  # initialises the devices, without which there are no generators
    generators = torch.get_device_module(kind).default_generators
    return [generators[index] for index in indices]


def _kind() -> str | None:
    """The type of this process's accelerators."""
    kind = torch.accelerator.current_accelerator()
    return kind.type if kind is not None and hasattr(torch.get_device_module(kind), "default_generators") else None
