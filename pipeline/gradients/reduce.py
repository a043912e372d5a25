"""The reduction of stores over ranks: one sum of their gradients, the same on each rank.

    descriptions of all ranks      -->   the union of their keys, in the order of the parameters
        dense:    flat buckets   --all_reduce-->   each key's part
        sparse:   padded indices and values   --all_gather-->   one after the other, by rank

A key that some ranks lack counts as nothing there; one that all lack stays absent. All ranks decide from the
same descriptions what to send, so they refuse together and none waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common.arguments import check_group
from pipeline.gradients.slot import GradientSum, mixed_layouts, sum_dtype

OPS = ("sum", "mean")
_SAME = (
    "Make them of the same model, its parameters in the same order. Those of pipe.step over ranks hold each rank's own "
    "parameters, whose gradients are whole: there is nothing to add."
)
BUCKET_BYTES = 25 << 20  # enough that bandwidth counts, not latency; DistributedDataParallel's size


class Word(NamedTuple):
    """A rank's description of its sum for one parameter."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # of the sum; None: absent
    device: str
    sparse: int  # the number of sparse dimensions; 0: dense
    entries: int  # those that it stores, if sparse


class Description(NamedTuple):
    """A rank's description of its store, and of what it asks for."""

    op: str
    strict: bool
    words: list[Word] | None  # of its sums; None: an open store


Column: TypeAlias = tuple[Word, ...]  # by rank


def all_reduce(
    named: Sequence[tuple[str | None, GradientSum]] | None, group: dist.ProcessGroup | None, op: str, strict: bool
) -> None:
    """Put the sum (or mean) over all ranks of a group into every slot that any of them has filled.

    Raises:
        ValueError: an unknown op, different ops on ranks, a rank's store that is open (`named` is None there), or ranks
            whose parameters differ.
        TypeError: a gradient that is sparse on one rank and dense on another, where one of the ranks is `strict`.
    """
    check_group(group)
    world = dist.get_world_size(group)
    words = None if named is None else [_word(name, slot) for name, slot in named]
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, Description(op, strict, words), group=group)
    strict = any(description.strict for description in by_rank)
    columns = _checked_columns(by_rank)
    assert named is not None  # checked
    slots = [slot for _, slot in named]
    dense: list[int] = []
    sparse: list[int] = []
    for key, column in enumerate(columns):
        layouts = {description.sparse for description in column if description.dtype}
        if strict and len(layouts) > 1:
            raise TypeError(mixed_layouts(slots[key].param))
        if layouts:
            (dense if len(layouts) > 1 or 0 in layouts else sparse).append(key)
    for bucket in _buckets(dense, columns):
        _reduce_dense([slots[key] for key in bucket], _dtype(columns[bucket[0]]), group, op, world)
    for key in sparse:
        _reduce_sparse(slots[key], columns[key], group, op)


def _word(name: str | None, slot: GradientSum) -> Word:
    grad = slot.sum
    if grad is None:
        return Word(name, tuple(slot.param.shape), None, str(slot.param.device), 0, 0)
    sparse, count = (grad.sparse_dim(), grad._nnz()) if grad.is_sparse else (0, 0)
    return Word(name, tuple(grad.shape), grad.dtype, str(grad.device), sparse, count)


def _checked_columns(by_rank: Sequence[Description]) -> list[Column]:
    """The ranks' words of each parameter. What any rank alone would refuse all refuse, so that none waits for it."""
    ops = [description.op for description in by_rank]
    if any(op != ops[0] for op in ops):
        raise ValueError(f"the ranks called all_reduce_ with different ops: {ops}, by rank. Use the same on all.")
    if ops[0] not in OPS:
        raise ValueError(f"op is {ops[0]!r}. Use 'sum', or 'mean', which divides by the number of ranks.")
    words = [description.words for description in by_rank if description.words is not None]
    if len(words) < len(by_rank):
        raise ValueError(
            "an open GradStore has no order of its parameters that ranks share. Make it of them: GradStore(module)."
        )
    counts = [len(of_rank) for of_rank in words]
    if len(set(counts)) > 1:
        raise ValueError(f"the GradStores of the ranks hold {counts} parameters, by rank. {_SAME}")
    columns = list(zip(*words, strict=True))
    for key, column in enumerate(columns):
        if len({(description.name, description.shape) for description in column}) > 1:
            listing = ", ".join(f"{description.name or 'no name'} {list(description.shape)}" for description in column)
            raise ValueError(
                f"parameter {key} of the GradStore is not the same on all ranks: {listing}, by rank. {_SAME}"
            )
    return columns


def _dtype(column: Column) -> torch.dtype:
    """The widest type of the ranks' sums."""
    return sum_dtype(*[description.dtype for description in column if description.dtype])


def _buckets(keys: Sequence[int], columns: Sequence[Column]) -> Iterator[list[int]]:
    """Consecutive keys of one type, on each rank on one device; at most BUCKET_BYTES, or a single key."""
    bucket: list[int] = []
    bucket_layout, size = None, 0
    for key in keys:
        dtype = _dtype(columns[key])
        layout = (dtype, *(description.device for description in columns[key]))
        key_bytes = torch.Size(columns[key][0].shape).numel() * dtype.itemsize
        if bucket and (layout != bucket_layout or size + key_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(key)
        bucket_layout, size = layout, size + key_bytes
    if bucket:
        yield bucket


def _reduce_dense(
    slots: Sequence[GradientSum], dtype: torch.dtype, group: dist.ProcessGroup | None, op: str, world: int
) -> None:
    flat = torch.cat([_dense(slot, dtype).reshape(-1) for slot in slots])
    dist.all_reduce(flat, group=group)
    if op == "mean":
        flat.div_(world)
    for slot, part in zip(slots, flat.split([slot.param.numel() for slot in slots]), strict=True):
        slot.put(part.view(slot.param.shape).clone())  # a copy: pop() must not keep the bucket alive


def _dense(slot: GradientSum, dtype: torch.dtype) -> Tensor:
    if slot.sum is None:
        return torch.zeros_like(slot.param, dtype=dtype, memory_format=torch.contiguous_format)
    return slot.sum.to_dense().to(dtype)


def _reduce_sparse(slot: GradientSum, column: Column, group: dist.ProcessGroup | None, op: str) -> None:
    dims = max(description.sparse for description in column)
    most, dtype = max(description.entries for description in column), _dtype(column)
    local_sum, shape = slot.sum, slot.param.shape
    device = slot.param.device if local_sum is None else local_sum.device
    indices = torch.zeros(dims, most, dtype=torch.int64, device=device)
    values = torch.zeros(most, *shape[dims:], dtype=dtype, device=device)
    if local_sum is not None:
        indices[:, : local_sum._nnz()] = local_sum._indices()
        values[: local_sum._nnz()] = local_sum._values()
    all_indices, all_values = _gathered(indices, group), _gathered(values, group)
    cut = list(enumerate(description.entries for description in column))
    total = torch.sparse_coo_tensor(
        torch.cat([all_indices[rank][:, :count] for rank, count in cut], 1),
        torch.cat([all_values[rank][:count] for rank, count in cut]),
        shape,
        device=device,
        check_invariants=True,
    ).coalesce()
    slot.put(total / len(column) if op == "mean" else total)


def _gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    if tensor.numel():
        dist.all_gather(parts, tensor, group=group)
    return parts
