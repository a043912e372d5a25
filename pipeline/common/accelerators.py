"""Accelerators as torch.accelerator knows them: one path for CUDA, ROCm, XPU, NPU and any other kind.

    accelerators(), device_of_rank()     which there are; the one of a rank
    device_identity(device)              its name in all processes of a host
    entered(device)                      within: it is the current device
    entered_streams(stream, ...)         within: streams are current
    beside(streams)                      the same; they wait for those that were current, and these for them
    bind(streams)                        their devices are ready in this thread
    use_here(tensors), use_in(stream, t) tells the allocator which streams use tensors of others
    moved_in_place(device)               within: parameters that move there stay the same objects
    device_generators(devices)           what layers there draw from
    peak_bytes(device)                   the most that was allocated there
    is_capturing(devices)                whether a graph of their work is being made

A process has accelerators of one kind. Those of a kind without default generators that can be seeded (MPS: one device,
one stream) are treated as the host is: plain copies, no streams.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from partition.contents import unwrapped

# The number of a process on its host, as torchrun, Open MPI, MPICH and Intel MPI, MVAPICH, and srun set it. Slurm's
# comes last: within an allocation the processes of mpirun inherit that of the shell.
LOCAL_RANKS = (
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip


def is_accelerator(device: torch.device) -> bool:
    """Whether this is a device with streams and a generator of its own."""
    return device.type != "cpu" and device.type == _kind()


def accelerators() -> list[torch.device]:
    """All accelerators that this process sees."""
    kind = _kind()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def device_of_rank() -> torch.device:
    """The device of this process, which is one of several: by its number on the host, or the current one."""
    devices = accelerators()
    if not devices:
        return torch.device("cpu")
    number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), None)
    index = torch.accelerator.current_device_index() if number is None else int(number)
    return devices[index % len(devices)]  # a launcher may show each process one device


def device_identity(device: torch.device) -> str:
    """The name of an accelerator in all processes of a host; "" if it has none, and for the host itself.

    Where there are no UUIDs the number is one, but not in a process that sees one device: others may see others.
    """
    if not is_accelerator(device):
        return ""
    read = getattr(torch.get_device_module(device), "get_device_properties", lambda device: None)
    uuid = getattr(read(device), "uuid", None)
    if uuid is None:
        return str(device) if torch.accelerator.device_count() > 1 else ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{uuid} {visible}" if "MIG" in visible else str(uuid)  # parts of one GPU, which CUDA may give its UUID


def entered(device: torch.device) -> torch.accelerator.device_index:
    """A context. Within: this accelerator is the current one; for the host nothing changes."""
    return torch.accelerator.device_index(device.index if is_accelerator(device) else None)


@contextmanager
def entered_streams(*streams: torch.Stream) -> Iterator[None]:
    """Within: these streams are the current ones of their devices. In any thread, as often as one likes.

    A `torch.Stream` as a context cannot be entered by two threads at a time.
    """
    device = torch.accelerator.current_device_index()
    previous = [torch.accelerator.current_stream(stream.device) for stream in streams]
    try:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        yield
    finally:
        for stream in previous:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)


def bind(streams: Iterable[torch.Stream]) -> None:
    """Bind the devices of streams to this thread. CUDA does so at a thread's first kernel, and cuBLAS warns before."""
    for stream in streams:
        stream.query()


def current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The current streams of those of `devices` that are accelerators."""
    return [torch.accelerator.current_stream(device) for device in dict.fromkeys(devices) if is_accelerator(device)]


@contextmanager
def beside(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Within: these streams are current. They first wait for those that were, which wait for them at the end."""
    outer_streams = current_streams([stream.device for stream in streams])
    if outer_streams == streams:
        yield
        return
    for stream, outer in zip(streams, outer_streams, strict=True):
        stream.wait_stream(outer)
    with entered_streams(*streams):
        yield
    for stream, outer in zip(streams, outer_streams, strict=True):
        outer.wait_stream(stream)


def use_here(tensors: Iterable[Tensor | None]) -> None:
    """Tell the allocator that the current streams use tensors that were made on others."""
    for tensor in tensors:
        if tensor is not None and is_accelerator(tensor.device) and not is_legacy_batchedtensor(tensor):
            use_in(torch.accelerator.current_stream(tensor.device), tensor)


def use_in(stream: torch.Stream, tensor: Tensor) -> None:
    """Tell the allocator that a stream uses a tensor that was made on another, or the tensors that it is made of."""
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else unwrapped(tensor):
        part.record_stream(stream)


@contextmanager
def moved_in_place(device: torch.device) -> Iterator[None]:
    """Within: `Module.to(device)` leaves parameters the objects that they are, on any device as on CUDA.

    By default it replaces them on devices of other backends than torch's own, which unties weights.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    on_host, on_device = torch.empty(0, device="cpu"), torch.empty(0, device=device)
    if not torch._has_compatible_shallow_copy_type(on_host, on_device):
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def device_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of those of `devices` that are accelerators."""
    kind = _kind()
    indices = sorted({device.index or 0 for device in devices if device.type == kind})
    if kind is None or not indices:
        return []
    torch.accelerator.current_device_index()  # initialises the devices, without which there are no generators
    generators = torch.get_device_module(kind).default_generators
    return [generators[index] for index in indices]


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes that were allocated on an accelerator since its statistics began. None: nobody counts them."""
    if not is_accelerator(device):
        return None
    try:
        peak = torch.accelerator.memory_stats(device).get("allocated_bytes.all.peak")
    except (RuntimeError, NotImplementedError):  # its allocator keeps no statistics
        return None
    return None if peak is None else int(peak)


def is_capturing(devices: Iterable[torch.device]) -> bool:
    """Whether work of the current accelerator is being captured into a graph, if one of `devices` is an accelerator."""
    kind = _kind()
    if kind is None or kind not in {device.type for device in devices}:
        return False
    asks = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)  # CUDA and XPU have graphs
    return asks is not None and asks()


def _kind() -> str | None:
    """The type of this process's accelerators."""
    kind = torch.accelerator.current_accelerator()
    return kind.type if kind is not None and hasattr(torch.get_device_module(kind), "default_generators") else None
