"""Fingerprints of outputs: a few entries of each, compared with those of a recomputation.

They are read where they lie in memory: right after a large kernel a call of a torch operator costs several times what
reading 32 numbers does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from partition.contents import unwrapped
from pipeline.data.pytrees import Checksums, checksums, same_checksums, same_values

COUNT = 32  # of each tensor
_GOLDEN = (5**0.5 - 1) / 2  # its multiples spread evenly, also within rows and columns
_WORDS: dict[torch.dtype, tuple[Any, torch.dtype]] = {
    dtype: ((ctypes.c_int8, ctypes.c_int16, ctypes.c_int32, ctypes.c_int64)[size], word)
    for size, word, dtypes in (
        (0, torch.int8, (torch.bool, torch.int8, torch.uint8)),
        (1, torch.int16, (torch.int16, torch.bfloat16, torch.float16)),
        (2, torch.int32, (torch.int32, torch.float32)),
        (3, torch.int64, (torch.int64, torch.float64)),
    )
    for dtype in dtypes
}

_PLAIN = (Tensor, torch.nn.Parameter)
EntrySample: TypeAlias = tuple[torch.dtype, torch.Size, object]
EntryBits: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
Entries: TypeAlias = EntryBits | Tensor
"""The entries of one tensor: the bits of each, or a tensor where memory does not show them."""


class Fingerprints(dict[int, tuple[list[Entries], Checksums]]):
    """The fingerprints of the outputs of one stage in one call, by chunk.

    Args:
        sums: whether to take sums over each output, beside entries.
    """

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self._sums = sums

    def of(self, outputs: Sequence[Tensor]) -> tuple[list[Entries], Checksums]:
        """Those of outputs."""
        return entries(outputs), checksums(outputs) if self._sums else []

    def agree(self, chunk: int, outputs: Sequence[Tensor]) -> bool:
        """Whether the outputs of a recomputation have those of its forward."""
        (entries_then, sums_then), (entries_now, sums_now) = self[chunk], self.of(outputs)
        return same_checksums(sums_then, sums_now) and same_entries(entries_then, entries_now)


def positions(size: int) -> list[int]:
    """The positions, in order, of the entries that are taken of `size`: all of them if they are few.

    >>> positions(3), positions(1024)[:4]
    ([0, 1, 2], [0, 35, 70, 92])
    """
    if size <= COUNT:
        return list(range(size))
    return sorted({int(size * (number * _GOLDEN % 1)) for number in range(COUNT)})


def entries(tensors: Sequence[Tensor]) -> list[Entries]:
    """The entries of each tensor; of one that wraps others those of these.

    None for those on a GPU, where comparing would make the host wait.
    """
    return [
        _entries(part) for tensor in tensors if tensor.is_cpu
        for part in ((tensor,) if type(tensor) is Tensor else unwrapped(tensor))
    ]


def sample(tensor: Tensor, known_addresses: Container[int]) -> EntrySample:
    """A sample of a tensor, to be compared with `==`: dtype, shape, and some bytes of the memory in which it lies.

    Equal tensors may have samples that differ, where memory does not show the values or holds others beside them. Of
    memory that begins at one of `known_addresses` that is the sample. A GPU is not asked: the host would have to wait.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return tensor.dtype, tensor.shape, object()
    begin = tensor.data_ptr()
    if begin in known_addresses or not begin:
        return tensor.dtype, tensor.shape, begin
    if not tensor.is_cpu:
        return tensor.dtype, tensor.shape, tensor.device
    dtype, shape = tensor.dtype, tensor.shape
    return dtype, shape, _sampler(dtype, shape, tensor.stride())(begin)


def addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The addresses of those tensors that have memory of the usual kind."""
    return frozenset([
        tensor.data_ptr() for tensor in tensors if type(tensor) in _PLAIN and tensor.layout is torch.strided
    ])


@lru_cache(maxsize=512)
def _sampler(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Callable[[int], object]:
    """A function from a tensor's address to some bytes of its memory, 60 or more; to entries where that has gaps.

    Of a number those bytes come in turns, of a whole number the lowest alone; of one row other features than of the
    next.
    """
    size = dtype.itemsize * (1 + sum([(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]))
    if size > dtype.itemsize * prod(shape):
        if dtype.is_complex:
            return _reader(dtype.to_real(), (*shape, 2), (*[2 * stride for stride in strides], 1))
        if dtype in _WORDS:
            return _reader(dtype, shape, strides)
    row = dtype.itemsize * (strides[-2] if len(shape) > 1 and strides[-2] else 1)
    step = size // (2 * COUNT)
    if row <= 2 * step:
        step += int(row * _GOLDEN) - step % row
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    part = slice(0, size, max(step // dtype.itemsize, 1) * dtype.itemsize if is_whole else step | 1)
    memory: Any = ctypes.c_char * size
    return lambda begin: memory.from_address(begin)[part]


def _entries(tensor: Tensor) -> Entries:
    dtype = tensor.dtype
    if type(tensor) is not Tensor or dtype not in _WORDS or tensor.layout is not torch.strided or tensor.is_neg():
        return _by_torch(tensor)
    begin = tensor.data_ptr()
    if not begin:  # no memory of its own, or empty
        return _by_torch(tensor)
    if tensor.is_contiguous():
        return dtype, _reader(dtype, (tensor.numel(),), (1,))(begin)
    return dtype, _reader(dtype, tensor.shape, tensor.stride())(begin)


def same_entries(then: Sequence[Entries], now: Sequence[Entries]) -> bool:
    """Whether they are equal, value by value: nan equals nan, and 0 equals -0."""
    if len(then) != len(now):
        return False
    for one, other in zip(then, now, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple) and one == other:
            continue
        if not same_values(_values(one), _values(other)):
            return False
    return True


@lru_cache(maxsize=512)
def _reader(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Callable[[int], tuple[int, ...]]:
    """A function from a tensor's address to the bits of the entries that are taken."""
    indices = numpy.unravel_index(positions(prod(shape)), tuple(shape))
    offsets = (numpy.array(strides) @ numpy.array(indices)).tolist()
    words = _WORDS[dtype][0] * (max(offsets) + 1)
    if len(offsets) == 1:
        return lambda begin: tuple(words.from_address(begin))
    take = itemgetter(*offsets)
    return lambda begin: take(words.from_address(begin))


def _values(entries: Entries) -> Tensor:
    if isinstance(entries, Tensor):
        return entries
    dtype, words = entries
    return torch.tensor(words, dtype=_WORDS[dtype][1], device="cpu").view(dtype)


def _by_torch(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.reshape(-1)[torch.tensor(positions(dense.numel()), dtype=torch.int64, device=dense.device)]
