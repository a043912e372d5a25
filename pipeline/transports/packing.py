"""The packing of tensors into one flat buffer of bytes, and back.

    settled tensors --Packing.of--> Packing: what they look like, and where each goes
    header, tensors --pack-->  [header | tensor 0 | gap | tensor 1 | gap | tensor 2]  --unpack--> tensors

Each tensor begins as far behind a multiple of 64 bytes, the length of a cache line, as it did where it was sent:
kernels add in another order where that is another offset, and numbers would have other last bits. On the other side
each has a storage and a version counter of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.pytrees import LINE
from pipeline.transports.tensor_spec import StridedSpec, TensorSpec, built, fits, memories, part_specs, spec_of

_UINT8, _HOST, _ONE = torch.uint8, torch.device("cpu"), (1,)


class Packing:
    """The specs of the tensors of a message, and their places in its buffer.

    Attributes:
        specs: one for each tensor; None for None.
        nbytes: the size of the payload.

    Example:
        >>> tensors = (torch.arange(3), None, torch.tensor(True))
        >>> packing = Packing.of(tensors)
        >>> buffer = packing.pack(bytes(64), tensors)
        >>> packing.nbytes, len(buffer)
        (65, 129)
        >>> packing.unpack(buffer, 64, torch.device("cpu"))
        (tensor([0, 1, 2]), None, tensor(True))

    """

    __slots__ = ("specs", "nbytes", "_has_gaps", "_spans", "_leaves_gaps")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = tuple(specs)
        self._spans: list[_ByteSpan] = []
        self._has_gaps = False
        end = 0
        for part in chain.from_iterable(map(part_specs, self.specs)):
            numbers = prod(part.shape) if part.has_wide_gaps else part.span
            gap = -end % LINE + part.offset * part.dtype.itemsize if numbers else 0
            self._spans.append(_ByteSpan(part, numbers, end + gap, numbers * part.dtype.itemsize))
            self._has_gaps |= gap > 0
            end = self._spans[-1].begin + self._spans[-1].nbytes
        self.nbytes = end
        self._leaves_gaps = any([span.spec.has_wide_gaps for span in self._spans])

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Packing:
        """The packing of these tensors, which have been settled."""
        return cls([None if tensor is None else spec_of(tensor) for tensor in tensors])

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these tensors look like that and can be sent as they are."""
        return len(tensors) == len(self.specs) and all(map(fits, tensors, self.specs))

    def pack(self, header: bytes, tensors: Sequence[Tensor | None]) -> Tensor:
        """A new buffer: the header (whose size is a multiple of 64), and the tensors, which fit.

        The bytes are copied without an operator of torch: three of them took longer than a small message is under way.
        """
        parts, start = _on_host(self._parts(tensors), self._spans), len(header)
        make = torch.zeros if self._has_gaps else torch.empty
        buffer = make(start + self.nbytes, dtype=_UINT8, device=_HOST)
        address = buffer.data_ptr()
        ctypes.memmove(address, header, start)
        for part, (_, _, begin, nbytes) in zip(parts, self._spans, strict=True):
            source = part.data_ptr()
            if source:
                ctypes.memmove(address + start + begin, source, nbytes)
            else:  # empty, or autograd's zeros, which have no memory
                ctypes.memset(address + start + begin, 0, nbytes)
        return buffer

    def pack_payload(self, tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A new buffer on a device: the tensors, which fit, on whatever device. The host waits for none of them."""
        nothing = torch.zeros(2 * LINE, dtype=_UINT8, device=device) if self._has_gaps else None
        pieces, end = list[Tensor](), 0
        for part, (_, count, begin, nbytes) in zip(self._parts(tensors), self._spans, strict=True):
            if nothing is not None and begin > end:
                pieces.append(nothing[: begin - end])
            if count:
                pieces.append(_on_device(_bytes_of(part, count), device))
            end = begin + nbytes
        return torch.cat(pieces)

    def unpack(self, buffer: Tensor, start: int, device: torch.device) -> tuple[Tensor | None, ...]:
        """The tensors in a buffer.

        Args:
            buffer: they keep its memory, each its stretch of it.
            start: where the payload begins, in bytes.
            device: where the tensors shall be.
        """
        parts = self._on_host(buffer, start) if device.type == "cpu" else self._on_device(buffer, start, device)
        return tuple([None if spec is None else built(spec, parts) for spec in self.specs])

    def _parts(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The tensors in memory, whose numbers that travel lie side by side."""
        parts = list(memories(tensors))
        if not self._leaves_gaps:
            return parts
        pairs = zip(parts, self._spans, strict=True)
        return [part.contiguous() if span.spec.has_wide_gaps else part for part, span in pairs]

    def _on_host(self, buffer: Tensor, start: int) -> Iterator[Tensor]:
        memory = buffer.numpy()
        for part, count, begin, _ in self._spans:
            if count:  # a storage of its own, unlike a view of the buffer
                numbers = torch.frombuffer(memory, dtype=part.dtype, count=count, offset=start + begin)
                yield _laid_out(numbers, part)
            else:
                yield torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=_HOST)

    def _on_device(self, buffer: Tensor, start: int, device: torch.device) -> Iterator[Tensor]:
        """One copy to the device, in its current stream, and from there one for each part where there are several."""
        payload = buffer[start : start + self.nbytes].to(device, non_blocking=True)
        for part, _, begin, nbytes in self._spans:
            piece = payload[begin : begin + nbytes]
            numbers = (piece if len(self._spans) == 1 else piece.clone()).view(part.dtype)
            yield _laid_out(numbers.detach(), part)


class _ByteSpan(NamedTuple):
    """The memory of a part: what it is; how many numbers travel, where these begin in the payload, and their bytes."""

    spec: StridedSpec
    numbers: int
    begin: int
    nbytes: int


def _laid_out(numbers: Tensor, spec: StridedSpec) -> Tensor:
    """The tensor of the numbers that have travelled, in their memory, or in memory that has its gaps."""
    if not spec.has_wide_gaps:
        return numbers.as_strided_(spec.shape, spec.stride)
    memory = numbers.new_empty(spec.offset + spec.span)
    return memory.as_strided_(spec.shape, spec.stride, spec.offset).copy_(numbers.view(spec.shape))


def _bytes_of(part: Tensor, count: int) -> Tensor:
    return part.as_strided((count,), _ONE).view(_UINT8)


def _on_host(parts: list[Tensor], spans: Sequence[_ByteSpan]) -> list[Tensor]:
    """The same memory on the host, which waits for the devices that have some of it."""
    if all([part.is_cpu for part in parts]):
        return parts
    staged = [
        part if part.is_cpu else _pinned(_bytes_of(part, span.numbers)) for part, span in zip(parts, spans, strict=True)
    ]
    for device in {part.device for part in parts if not part.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()
    return staged


def _on_device(piece: Tensor, device: torch.device) -> Tensor:
    """The same bytes on a device. From the host they are copied out of pages that do not move: else it would wait."""
    if piece.device == device:
        return piece
    return (_pinned(piece) if piece.is_cpu else piece).to(device, non_blocking=True)


def _pinned(piece: Tensor) -> Tensor:
    return torch.empty(piece.shape, dtype=_UINT8, device=_HOST, pin_memory=True).copy_(piece, non_blocking=True)
