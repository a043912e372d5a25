"""How do tensors become one flat buffer of bytes, and tensors again?

    tensors --settle--> tensors that can be sent --Packing.of--> Packing: what they look like, and where each goes
    header, tensors --pack-->  [header | tensor 0 | gap | tensor 1 | gap | tensor 2]  --unpack--> tensors

Each tensor begins at a multiple of 64 bytes, so that kernels find aligned memory: they add in another order where it
is not, and bits would depend on the place of a tensor in its message. Each has a storage and a version counter of its
own on the other side. Strides stay as they are: a dense tensor travels as its memory lies there; an expanded one (the
gradient of a sum) or one with gaps as the span of memory that it covers. A sparse tensor travels as its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

ALIGNMENT = 64
_UINT8, _STRIDED, _HOST = torch.uint8, torch.strided, torch.device("cpu")
_ONE = (1,)
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_BY_ROW = {torch.sparse_csr, torch.sparse_bsr}


class Strided(NamedTuple):
    """What a tensor in memory looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """How many numbers its memory spans: more than it has where there are gaps, less where it is expanded."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


class Sparse(NamedTuple):
    """What a sparse tensor looks like: of which parts it is made."""

    layout: torch.layout
    shape: tuple[int, ...]
    coalesced: bool
    parts: tuple[Strided, ...]


Kind: TypeAlias = Strided | Sparse | None


class Packing:
    """What the tensors of a message look like, and where in its buffer each goes.

    Attributes:
        kinds: one for each tensor; None for None.
        nbytes: the size of the payload.

    Example:
        >>> tensors = (torch.arange(3), None, torch.tensor(True))
        >>> packing = Packing.of(tensors)
        >>> buffer = packing.pack(torch.zeros(64, dtype=torch.uint8), tensors)
        >>> packing.nbytes, len(buffer)
        (65, 129)
        >>> packing.unpack(buffer, 64, torch.device("cpu"))
        (tensor([0, 1, 2]), None, tensor(True))

    """

    __slots__ = ("kinds", "nbytes", "_gaps", "_spans")

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = tuple(kinds)
        self._spans: list[tuple[Strided, int, int]] = []  # each part: what it is, how many numbers, where it begins
        self._gaps: list[Tensor | None] = []  # what lies before it
        end = 0
        for part in chain.from_iterable(map(_parts, self.kinds)):
            gap = -end % ALIGNMENT if part.span else 0
            self._gaps.append(torch.zeros(gap, dtype=_UINT8, device=_HOST) if gap else None)
            self._spans.append((part, part.span, end + gap))
            end += gap + part.span * part.dtype.itemsize
        self.nbytes = end

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Packing:
        """What these tensors look like; they have been settled."""
        return cls([None if tensor is None else _kind(tensor) for tensor in tensors])

    def plain(self) -> list[tuple[Any, ...] | None]:
        """Itself as plain values, for `pipeline.transports.codec.encode_plain`."""
        return [None if kind is None else _plain(kind) for kind in self.kinds]

    @classmethod
    def from_plain(cls, plain: Sequence[tuple[Any, ...] | None]) -> Packing:
        """What has been made plain."""
        return cls([None if each is None else _from_plain(each) for each in plain])

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these tensors look like that and can be sent as they are."""
        return len(tensors) == len(self.kinds) and all(map(_fits, tensors, self.kinds))

    def pack(self, header: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        """A new buffer: the header (whose size is a multiple of 64), and the tensors, which fit."""
        pieces = [header]
        for part, (_, count, _), gap in zip(_memories(tensors), self._spans, self._gaps, strict=True):
            if gap is not None:
                pieces.append(gap)
            if count:
                pieces.append(part.as_strided((count,), _ONE).view(_UINT8))
        return torch.cat(_on_host(pieces))

    def unpack(self, buffer: Tensor, start: int, device: torch.device) -> tuple[Tensor | None, ...]:
        """The tensors in a buffer.

        Args:
            buffer: they keep its memory, each its stretch of it.
            start: where the payload begins, in bytes.
            device: where the tensors shall be.
        """
        found = self._on_host(buffer, start) if device.type == "cpu" else self._elsewhere(buffer, start, device)
        return tuple([None if kind is None else _built(kind, found) for kind in self.kinds])

    def _on_host(self, buffer: Tensor, start: int) -> Iterator[Tensor]:
        memory = buffer.numpy()
        for part, count, begin in self._spans:
            if count:  # a storage of its own, unlike a view of the buffer
                numbers = torch.frombuffer(memory, dtype=part.dtype, count=count, offset=start + begin)
                yield numbers.as_strided_(part.shape, part.stride)
            else:
                yield torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=_HOST)

    def _elsewhere(self, buffer: Tensor, start: int, device: torch.device) -> Iterator[Tensor]:
        """One copy to the device, in its current stream, and from there one for each part where there are several."""
        payload = buffer[start : start + self.nbytes].to(device, non_blocking=True)
        for part, count, begin in self._spans:
            piece = payload[begin : begin + count * part.dtype.itemsize]
            numbers = (piece if len(self._spans) == 1 else piece.clone()).view(part.dtype)
            yield numbers.as_strided(part.shape, part.stride).detach()


def settle(tensors: Sequence[Tensor | None], what: str) -> tuple[Tensor | None, ...]:
    """The same numbers in tensors that can be sent: without a graph, conjugated and negated in memory.

    Args:
        what: how an error names them: "2F0 from rank 0 to rank 1".

    Raises:
        TypeError: a tensor cannot be sent. It says why and what to do.
    """
    return tuple([None if tensor is None else _settled(tensor, what) for tensor in tensors])


def _settled(tensor: Tensor, what: str) -> Tensor:
    tensor = tensor.detach()
    reason = _unsendable(tensor)
    if reason is not None:
        raise TypeError(f"{what} holds {reason}")
    if tensor.layout is not _STRIDED:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor._is_zerotensor() or _kind_of_memory(tensor).span > 2 * tensor.numel():  # most of it would be gaps
        return tensor.clone()
    return tensor


def _unsendable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be sent."""
    if type(tensor) is not Tensor:
        kind = type(tensor)
        return (
            f"a {kind.__module__}.{kind.__qualname__}, and only plain tensors are sent to another rank: a subclass "
            "would arrive without what it adds. Return its parts as plain tensors."
        )
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}), which is not sent to another rank. Return tensor.dequantize()."
    if tensor.is_nested:
        return (
            "a nested tensor, which is not sent to another rank. Return torch.nested.to_padded_tensor(tensor, 0.0) "
            "and the lengths."
        )
    if tensor.layout is not _STRIDED and tensor.layout is not torch.sparse_coo and tensor.layout not in _COMPRESSED:
        return f"a tensor of layout {tensor.layout}, which is not sent to another rank. Return tensor.to_dense()."
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on {tensor.device}, and only what is on a CPU or a CUDA device is sent to another rank."
    return None


def _fits(tensor: Tensor | None, kind: Kind) -> bool:
    if tensor is None or kind is None:
        return tensor is None and kind is None
    if isinstance(kind, Sparse):
        return type(tensor) is Tensor and tensor.layout is kind.layout and _kind(tensor.detach()) == kind
    return (
        type(tensor) is Tensor
        and tensor.dtype is kind.dtype
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and tensor.shape == kind.shape
        and tensor.stride() == kind[2]
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def _kind(tensor: Tensor) -> Strided | Sparse:
    if tensor.layout is _STRIDED:
        return _kind_of_memory(tensor)
    coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    parts = tuple([_kind_of_memory(part) for part in _components(tensor)])
    return Sparse(tensor.layout, tuple(tensor.shape), coalesced, parts)


def _kind_of_memory(tensor: Tensor) -> Strided:
    return Strided(tensor.dtype, tuple(tensor.shape), tensor.stride())


def _parts(kind: Kind) -> tuple[Strided, ...]:
    if kind is None:
        return ()
    return kind.parts if isinstance(kind, Sparse) else (kind,)


def _plain(kind: Strided | Sparse) -> tuple[Any, ...]:
    return tuple(kind) if isinstance(kind, Strided) else (*kind[:3], *map(tuple, kind.parts))


def _from_plain(plain: tuple[Any, ...]) -> Strided | Sparse:
    if isinstance(plain[0], torch.dtype):
        return Strided(*plain)
    layout, shape, coalesced, *parts = plain
    return Sparse(layout, shape, coalesced, tuple([Strided(*part) for part in parts]))


def _memories(tensors: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """Of each tensor the tensors in memory that it is made of."""
    for tensor in tensors:
        if tensor is not None and tensor.layout is _STRIDED:
            yield tensor
        elif tensor is not None:
            yield from _components(tensor)


def _components(tensor: Tensor) -> list[Tensor]:
    """The parts of a sparse tensor, each settled."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        found: tuple[Tensor, ...] = (tensor._indices(), tensor._values())
    elif tensor.layout in _BY_ROW:
        found = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    else:
        found = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return [_settled(part, "a sparse tensor") for part in found]


def _built(kind: Strided | Sparse, found: Iterator[Tensor]) -> Tensor:
    """The tensor made of the next parts."""
    if isinstance(kind, Strided):
        return next(found)
    one, two, *three = [next(found) for _ in kind.parts]
    layout, shape, device = kind.layout, kind.shape, one.device
    if layout is torch.sparse_coo:
        built = torch.sparse_coo_tensor(one, two, shape, device=device, check_invariants=False)
        return built._coalesced_(kind.coalesced)
    (values,) = three
    return torch.sparse_compressed_tensor(
        one, two, values, shape, layout=layout, device=device, check_invariants=False
    )


def _on_host(pieces: list[Tensor]) -> list[Tensor]:
    """The same bytes on the host, which waits for the devices that have some of them."""
    if all([piece.is_cpu for piece in pieces]):
        return pieces
    staged = [piece if piece.is_cpu else _pinned(piece) for piece in pieces]
    for device in {piece.device for piece in pieces if not piece.is_cpu}:
        torch.cuda.current_stream(device).synchronize()
    return staged


def _pinned(piece: Tensor) -> Tensor:
    return torch.empty(piece.shape, dtype=_UINT8, device=_HOST, pin_memory=True).copy_(piece, non_blocking=True)
