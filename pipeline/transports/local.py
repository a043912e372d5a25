"""Transfers of values between devices of one process, in which only those wait that have to.

    send (in the producer's turn)                                     receive (in the reader's turn)
    device -> device    copy streams wait for the producer's stream,  the reader's stream waits for the copy
                        and copy
    host -> device      into pinned memory, from there by a stream    the reader's stream waits for the copy
    device -> host      by a stream into pinned memory                the host waits for this copy, and for nothing else
    same place          nothing                                       nothing
    CPU -> CPU          a copy (places apart, in tests)               nothing

Values move when they are made, so the copy of one chunk runs beside the computation of the next. Events order the
streams; the host goes on. A tensor that a stream reads or writes is recorded on it, so that the allocator does not give
its memory away before (torch.Tensor.record_stream). The idea of copy streams is torchgpipe's (Kim et al. 2020, arXiv
2004.09910, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from partition.contents import rewrapped, wraps
from pipeline.common.accelerators import entered_streams, is_accelerator, use_in
from pipeline.common.places import Place
from pipeline.data.pytrees import copied, line_offset, resolved, span_of, unrolled


class Parcel(NamedTuple):
    """Tensors under way, and the events after which they have arrived."""

    tensors: tuple[Tensor | None, ...]
    arrivals: tuple[torch.Event, ...] = ()


class Local:
    """A mover of tensors between places of one process. It holds its copy streams, and no tensor."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device], torch.Stream] = {}

    def __reduce__(self) -> tuple[type[Local], tuple[()]]:
        """A copy of a Pipe has streams of its own."""
        return Local, ()

    def send(self, tensors: Sequence[Tensor | None], source: Place | None, target: Place | None) -> Parcel:
        """Start to move tensors.

        Args:
            tensors: computed in the stream that is current now on their device.
            source: their place. None: with the caller, each on its own device.
            target: their new place. None: they stay.
        """
        values = tuple(tensors)
        if target is None or source == target or all([t is None or _is_there(t, source, target) for t in values]):
            return Parcel(values)
        streams: set[torch.Stream] = set()
        moved = tuple([None if tensor is None else self._moved(tensor, source, target, streams) for tensor in values])
        return Parcel(moved, tuple([stream.record_event() for stream in streams]))

    def receive(self, parcel: Parcel) -> tuple[Tensor | None, ...]:
        """The tensors, for use in the stream that is current now on their device."""
        for tensor, arrival in product(parcel.tensors, parcel.arrivals):
            if tensor is not None and is_accelerator(tensor.device):
                reader = torch.accelerator.current_stream(tensor.device)
                reader.wait_event(arrival)
                use_in(reader, tensor)
            elif tensor is not None:
                arrival.synchronize()  # the host itself reads it
        return parcel.tensors

    def carry(self, tensor: Tensor, source: Place | None, target: Place | None) -> Tensor:
        """Send and receive one tensor."""
        (moved,) = self.receive(self.send([tensor], source, target))
        assert moved is not None  # as it was sent
        return moved

    def _moved(
        self, tensor: Tensor, source: Place | None, target: Place, streams: set[torch.Stream]
    ) -> Tensor:
        if _is_there(tensor, source, target):
            return tensor
        if wraps(tensor):
            return rewrapped(tensor, lambda inner: self._moved(inner, source, target, streams))
        tensor = resolved(tensor)  # of a conjugate torch would make a copy at each use, record_stream too
        source_device, target_device = tensor.device, target.device
        reads, writes = is_accelerator(source_device), is_accelerator(target_device)
        if source_device == target_device and not reads:
            return copied(tensor)
        if _lies_otherwise(tensor):
            moved = self._moved(unrolled(tensor), source, target, streams)
            return moved.as_strided(tensor.shape, tensor.stride(), line_offset(tensor))
        if reads and writes:
            return self._between_accelerators(tensor, target_device, streams)
        if source_device.type == "cpu" and writes and tensor.layout is torch.strided:
            stream = self._stream(target_device, target_device)
            pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)  # the caller may write his own at once
            with entered_streams(stream):
                streams.add(stream)
                return pinned.to(target_device, non_blocking=True)
        if reads and target_device.type == "cpu" and tensor.layout is torch.strided:
            stream = self._stream(source_device, target_device)
            stream.wait_stream(torch.accelerator.current_stream(source_device))
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            with entered_streams(stream):
                pinned.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            streams.add(stream)
            return pinned
        return tensor.to(target_device)

    def _between_accelerators(self, tensor: Tensor, target_device: torch.device, streams: set[torch.Stream]) -> Tensor:
        """Both devices have a part in such a copy, each on its current stream. (They may be one, in tests.)"""
        reading, writing = self._stream(tensor.device, target_device), self._stream(target_device, target_device)
        reading.wait_stream(torch.accelerator.current_stream(tensor.device))
        with entered_streams(reading, writing):
            moved = tensor.to(target_device, non_blocking=True, copy=True)
        use_in(reading, tensor)
        streams.add(writing)
        return moved

    def _stream(self, device: torch.device, peer: torch.device) -> torch.Stream:
        """The stream on `device` for copies to `peer`; for what arrives, `device` itself stands for the others."""
        key = (device, peer)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams.setdefault(key, torch.Stream(device))
        return stream


def _lies_otherwise(tensor: Tensor) -> bool:
    """Whether a plain copy would lie in memory otherwise, and the span of the memory is to be moved in its place.

    Expanded, as the gradient of a sum is, it needs less than a number each; with gaps, as a real part has, more. Where
    a tensor lies otherwise kernels add in another order, so the numbers would depend on the place.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    span = span_of(tensor.shape, tensor.stride())
    return span <= 2 * tensor.numel() and (span != tensor.numel() or line_offset(tensor) > 0)


def _is_there(tensor: Tensor, source: Place | None, target: Place) -> bool:
    return (source is None or source == target) and tensor.device == target.device
