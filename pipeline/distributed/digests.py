"""Fingerprints: a few numbers that tell whether ranks have the same tensors.

    mini-batch    --sums of bits by position-->  one whole number     the same values have the same, to the bit
    gradients     --norm, product with weights-->  two floats each    compared with a tolerance: kernels may round

Both cost microseconds, so every call of a Pipe over ranks has them. Of large tensors they see a part. What is on an
accelerator is summed there, and asked for as late as can be, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.common.accelerators import is_accelerator

MOST, FEWER = 2**17, 2**13  # elements of a tensor that are looked at; of a larger one fewer, from all over it
WHOLE = 512  # elements of a tensor that are no sums
ROWS, ELEMENTS = 64, 2**15  # of a gradient: so many rows, or more if they are short
TOLERANCE, OF_HALF = 1e-2, 5e-2  # of the norm: kernels that add in another order are within, other labels are not
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """The fingerprint of tensors, as they are when this is made. It is exact, and depends on the order of elements.

    Attributes:
        is_on_host: whether the host has it already.

    Example:
        >>> x = torch.arange(6.0)
        >>> Fingerprint([x]).number == Fingerprint([x.clone()]).number
        True
        >>> Fingerprint([x]).number == Fingerprint([x.flip(0)]).number
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sums = [_HostCopy(_sums(part)) for tensor in tensors for part in dense_parts(tensor.detach())]
        self.is_on_host = all(sums.is_on_host for sums in self._sums)

    @property
    def number(self) -> int:
        """A whole number of 63 bits, at least 1."""
        hasher = hashlib.blake2b(digest_size=8)
        for sums in self._sums:
            hasher.update(sums.value().numpy().data)
        return int.from_bytes(hasher.digest(), "little") >> 1 or 1


class GradSketch(NamedTuple):
    """The sketch of a gradient.

    Attributes:
        norm: of the rows that are looked at.
        product: of these with fixed random weights.
        tolerance: how far others may be from this, as a part of the norm.
    """

    norm: float
    product: float
    tolerance: float

    def is_like(self, other: GradSketch) -> bool:
        """Whether it may be of the same gradient."""
        if not all(map(math.isfinite, (*self, *other))):
            return not (all(map(math.isfinite, self)) or all(map(math.isfinite, other)))
        bound = max(self.tolerance, other.tolerance) * max(self.norm, other.norm)
        return abs(self.norm - other.norm) <= bound and abs(self.product - other.product) <= bound

    def __str__(self) -> str:
        return f"norm {self.norm:.6g}, with random weights {self.product:.6g}"


class Sketches:
    """The sketches of gradients, as they are when this is made. None counts as zeros."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            self._copies = [_HostCopy(_sketch(grad)) for grad in grads]

    @property
    def values(self) -> list[GradSketch]:
        """The sketch of each gradient."""
        return [GradSketch(*host_copy.value().tolist()) for host_copy in self._copies]


class _HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self.is_on_host = tensor.device.type == "cpu"
        self._value = tensor
        if is_accelerator(tensor.device):
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._value.copy_(tensor, non_blocking=True)
            self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def value(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()  # of the copy alone: not of what has been begun since
        return self._value.cpu()


def dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """The tensor, or what a sparse one is made of."""
    if tensor.layout is torch.strided:
        return (tensor,)
    whole = tensor.to_sparse_coo() if tensor.layout is not torch.sparse_coo else tensor
    return whole.coalesce().indices(), whole.coalesce().values()


def _sums(tensor: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers, added up where positions are alike modulo p, and modulo p + 1.

    No order of adding gives another sum. Two positions are never alike in both, since p * (p + 1) exceeds their number:
    so it tells where one element is another, and where two are exchanged.
    """
    tensor = _thinned(tensor).resolve_conj().resolve_neg()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    count = bits.numel()
    if count <= WHOLE:
        return bits.clone()
    sums: list[Tensor] = []
    for period in (math.isqrt(count) + 1, math.isqrt(count) + 2):
        end = count - count % period
        sums += [bits[:end].view(-1, period).sum(0, dtype=bits.dtype), bits[end:]]
    return torch.cat(sums)


def _thinned(tensor: Tensor) -> Tensor:
    """Elements from all over a large tensor: the same ones, however it lies in memory."""
    if tensor.numel() <= MOST:
        return tensor
    while tensor.numel() > FEWER:
        dim = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        step = min(-(-tensor.numel() // FEWER), max(2, tensor.shape[dim] // 8))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    return tensor


def _sketch(grad: Tensor | None) -> Tensor:
    """The entries of a `GradSketch`, of rows from all over the gradient."""
    grad = None if grad is None else dense_parts(grad.detach())[-1]
    if grad is None or not grad.numel():
        return torch.zeros(3, device="cpu")
    grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    tolerance = OF_HALF if grad.itemsize < 4 else TOLERANCE
    grad = grad.reshape(1) if grad.dim() == 0 else grad
    remaining = max(ROWS, ELEMENTS // grad.shape[-1])
    for dim, size in enumerate(grad.shape[:-1]):
        count = max(1, min(size, remaining))
        grad = grad[(slice(None),) * dim + (slice(None, None, max(1, size // count)),)].narrow(dim, 0, min(size, count))
        remaining //= count
    rows = grad.reshape(-1, grad.shape[-1]).to(torch.float64 if grad.dtype is torch.float64 else torch.float32)
    products = rows @ _weights(rows.shape[1], rows.dtype, rows.device)
    product = products @ _weights(len(rows), rows.dtype, rows.device)
    return torch.stack([torch.linalg.vector_norm(rows), product, rows.new_full((), tolerance)])


@lru_cache(maxsize=32)
def _weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From 0.5 to 1.5, of either sign: with signs alone different gradients often have the same product."""
    numbers = torch.rand(count, generator=torch.Generator(device="cpu").manual_seed(count), device="cpu") * 2 - 1
    return (numbers + numbers.sign() / 2).to(device, dtype)
