"""Values that may cross a stage boundary: any pytree of tensors, None, bool, int, float and str.

    value --flatten--> Tree(distinct tensors, skeleton) --build(other tensors)--> a value of the same structure

A tensor that occurs twice in a value is one tensor, so its gradient is summed as in the plain module. Any other leaf is
refused by name: a value that cannot be sent to another process is not passed on in one process either, so that a script
works the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.masked import MaskedTensor
from torch.utils import _pytree as pytree

from partition.contents import PLAIN, unwrapped, wraps
from partition.opaque import remedy, type_name
from partition.precision import widened
from pipeline.common.torch_modes import without_function_modes

Grads: TypeAlias = tuple[Tensor | None, ...]
Checksums: TypeAlias = list[tuple[Tensor, Tensor, torch.dtype]]
MemoryId: TypeAlias = tuple[int, int, int]  # of memory in the plain module, which copies keep: stage, chunk, a number
Written: TypeAlias = tuple[tuple[MemoryId, str], ...]  # with the name of the stage that writes it
LINE = 64  # bytes of a cache line: memory of torch's own begins at multiples of it
_STAYING: dict[type, tuple[str, str]] = {
    MaskedTensor: ("MaskedTensor", "Give x.get_data() and x.get_mask()"),
    FakeTensor: ("FakeTensor", "A Pipe compares numbers, which it has none of: leave the FakeTensorMode"),
}
_FORMS: dict[str, tuple[str, str]] = {
    "is_nested": ("nested tensor", "Give a padded one and a mask: torch.nested.to_padded_tensor(x, 0.0)"),
    "is_quantized": ("quantized tensor", "Give x.dequantize()"),
    "is_meta": ("tensor on the meta device", "It has no numbers: give one that has"),
}
T = TypeVar("T")


class TensorPosition(NamedTuple):
    """The place of a tensor in a skeleton."""

    place: int


class Skeleton(NamedTuple):
    """A value without its tensors: the structure, and the leaves, each a TensorPosition or a plain value."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


class Tree(NamedTuple):
    """A value in two parts: its distinct tensors, and the rest. `skeleton` None: the value is the tensor itself."""

    tensors: tuple[Tensor, ...]
    skeleton: Skeleton | None

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return a value of this structure with other tensors in the places of its own."""
        if self.skeleton is None:
            return tensors[0]
        leaves = [tensors[leaf.place] if isinstance(leaf, TensorPosition) else leaf for leaf in self.skeleton.leaves]
        return pytree.tree_unflatten(leaves, self.skeleton.spec)


class Bundle(NamedTuple):
    """Several values as one: what a stage reads, or makes."""

    trees: tuple[Tree, ...]
    tensors: tuple[Tensor, ...]  # of all trees, one after the other

    @classmethod
    def of(cls, trees: tuple[Tree, ...]) -> Bundle:
        if len(trees) == 1:  # the usual case
            return cls(trees, trees[0].tensors)
        return cls(trees, tuple([tensor for tree in trees for tensor in tree.tensors]))

    def build(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values, with other tensors in the places of their own."""
        if len(self.trees) == 1:
            return [self.trees[0].build(tensors)]
        return list(map(Tree.build, self.trees, self.split(tensors)))

    def split(self, entries: Sequence[T]) -> list[Sequence[T]]:
        """Split a sequence with one entry per tensor, tree by tree."""
        return parts_of(entries, [len(tree.tensors) for tree in self.trees])


def parts_of(entries: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """A sequence in parts of these sizes.

    Example:
        >>> parts_of("abcdef", [1, 3])
        ['a', 'bcd']
    """
    if len(sizes) == 1:  # the usual case
        return [entries]
    return [entries[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


class Activations(NamedTuple):
    """The message of one stage to another: a tree of detached tensors, and which of them need a gradient.

    Attributes:
        memory: the identity of each tensor's memory; empty where no other tensor can share it.
        written: of the value that goes from stage to stage: the memory that stages before wrote copies of.
    """

    tree: Tree
    needs_grad: tuple[bool, ...]
    memory: tuple[MemoryId, ...] = ()
    written: Written = ()


def stays_whole(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that is not cut, and crosses no stage."""
    return tensor.is_nested or tensor.is_quantized or tensor.is_meta or type(tensor) in _STAYING


def flatten(value: Any, name: str | None) -> Tree:
    """Take a value apart.

    Args:
        value: a pytree.
        name: how an error names the value: "the output of stage 1". None: its leaves may be anything.

    Raises:
        TypeError: a leaf is neither a tensor nor None, bool, int, float or str, or a nested, quantized, ... tensor.
    """
    if isinstance(value, Tensor) and not stays_whole(value):
        return Tree((value,), None)
    leaves, spec = pytree.tree_flatten(value)
    slots: dict[int, TensorPosition] = {}
    tensors: list[Tensor] = []
    skeleton: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (name is None or not stays_whole(leaf)):
            if id(leaf) not in slots:
                slots[id(leaf)] = TensorPosition(len(tensors))
                tensors.append(leaf)
            skeleton.append(slots[id(leaf)])
        elif name is None or type(leaf) in PLAIN:
            skeleton.append(leaf)
        else:
            raise TypeError(_foreign_leaf(leaf, name))
    return Tree(tuple(tensors), Skeleton(spec, tuple(skeleton)))


def same_structure(one: Tree, other: Tree) -> bool:
    """Whether two trees differ in their tensors only."""
    if one.skeleton is None or other.skeleton is None:
        return one.skeleton is other.skeleton
    pairs = zip(one.skeleton.leaves, other.skeleton.leaves, strict=True)
    return one.skeleton.spec == other.skeleton.spec and all(
        type(mine) is type(theirs) and (mine == theirs or mine != mine) for mine, theirs in pairs
    )


def _foreign_leaf(leaf: Any, name: str) -> str:
    if isinstance(leaf, Tensor):
        kind, words = _STAYING.get(type(leaf)) or next(words for name, words in _FORMS.items() if getattr(leaf, name))
        return f"{name} holds a {kind}, which is not cut in rows and crosses no stage (in a stage it may be). {words}."
    return (
        f"{name} holds a {type_name(leaf)} ({str(leaf)[:60]}). Only tensors, None, bool, int, float, str and "
        f"containers of them cross stages: {remedy(leaf)}."
    )


def memory_of(
    tensors: Sequence[Tensor], by_storage: dict[int, MemoryId], stage: int, chunk: int
) -> tuple[MemoryId, ...]:
    """The identity of each tensor's memory: one of `by_storage`, or a new one, which is added."""
    return tuple([
        by_storage.setdefault(memory_address(tensor), (stage, chunk, number))
        for number, tensor in enumerate(tensors)
    ])


def versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The version of each tensor: the number of writes in place (0 for inference tensors, which do not count)."""
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:  # there is one; to ask each first takes as long again
        return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Detached tensors, as they cross a stage boundary."""
    return tuple(map(resolved, map(methodcaller("detach"), tensors)))


def resolved(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values: torch may defer a conjugate, a negative or zeros, and mark the tensor."""
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def memory_address(tensor: Tensor) -> int:
    """The address of a tensor's storage: equal for tensors that share it. One without (sparse, empty, zeros that torch
    has not written) shares none.

    Of one that wraps others it is that of the first of these.
    """
    if type(tensor) is not Tensor:
        tensor = next(unwrapped(tensor), tensor)
    try:
        place = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    except RuntimeError:  # of zeros; to ask each tensor first takes longer
        place = 0
    return place or id(tensor)


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The span of a tensor's memory, in numbers: more than it has where there are gaps, less where it is expanded.

    Example:
        >>> columns = torch.ones(3, 8)[:, 1:5]
        >>> span_of(columns.shape, columns.stride())
        20
    """
    return 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)]) if 0 not in shape else 0


def line_offset(tensor: Tensor) -> int:
    """The offset in a cache line at which a tensor begins, in numbers."""
    return tensor.data_ptr() % LINE // tensor.itemsize


def unrolled(tensor: Tensor) -> Tensor:
    """The numbers in the span of a tensor's memory, behind as many zeros as its offset in a cache line."""
    memory = tensor.as_strided((span_of(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())
    offset = line_offset(tensor)
    return torch.cat([memory.new_zeros(offset), memory]) if offset else memory


def copied(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the original does: with its gaps or expanded, at the same offset in a cache line.

    Of one that wraps others, or has no memory, it is torch's. Where a tensor lies otherwise kernels add in another
    order, and numbers differ in their last bits.

    Example:
        >>> columns = torch.ones(3, 8)[:, 1:5]
        >>> copy = copied(columns)
        >>> copy.stride(), copy.data_ptr() % 64, columns.clone().stride()
        ((8, 1), 4, (4, 1))
    """
    if tensor.layout is not torch.strided or 0 in tensor.shape or wraps(tensor):
        return tensor.clone()
    offset = line_offset(tensor)
    if not offset and tensor.is_contiguous():
        return tensor.clone()
    memory = unrolled(tensor) if offset else unrolled(tensor).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def unshared(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors that share memory neither with each other nor with `others`: copies where they would.

    Example:
        >>> x = torch.zeros(4)
        >>> y, z = unshared([x, torch.ones(4)], [x])
        >>> y.data_ptr() == x.data_ptr()
        False
    """
    taken, result = set(map(memory_address, others)), []
    with without_function_modes():
        for tensor in tensors:
            result.append(tensor.clone() if memory_address(tensor) in taken else tensor)
            taken.add(memory_address(tensor))
    return tuple(result)


def share_memory(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether another tensor has the memory of each. Of sparse ones and of subclasses that is not known.

    Example:
        >>> one, other = torch.zeros(4), torch.zeros(4)
        >>> half = one[:2]
        >>> share_memory([one, other])
        [True, False]
    """
    holders = torch._C._storage_Use_Count  # tensors, and the object that Python has of the storage meanwhile
    return [
        tensor.layout is torch.strided and type(tensor) is Tensor and holders(tensor.untyped_storage()._cdata) > 2
        for tensor in tensors
    ]


def computable(tensor: Tensor) -> Tensor:
    """A tensor with the same values, of a dtype in which torch computes: it does not in 8 bits."""
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def checksums(tensors: Sequence[Tensor]) -> Checksums:
    """Of each tensor its sum and the sum of its magnitudes, in float64; of one that wraps others those of these."""
    sums = []
    with torch.no_grad():
        for tensor in chain.from_iterable(map(unwrapped, tensors)):
            values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            values = values.dequantize() if values.is_quantized else values
            values = values.to_dense() if values.layout is not torch.strided else values
            values = computable(values) if values.is_floating_point() else values.to(torch.float64)
            total = values.sum(dtype=torch.float64)  # the cast happens in the kernel: no second copy of a large tensor
            sums.append((total, torch.linalg.vector_norm(values, 1, dtype=torch.float64), tensor.dtype))
    return sums


def same_checksums(ones: Checksums, others: Checksums) -> bool:
    """Whether two checksums agree up to what kernels that are not deterministic may differ by."""
    if len(ones) != len(others):
        return False
    return all([_close(*one, *other) for one, other in zip(ones, others, strict=True)])


def _close(
    one: Tensor, size: Tensor, dtype: torch.dtype, other: Tensor, other_size: Tensor, other_dtype: torch.dtype
) -> bool:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 1e-2)
    agree = (one - other).abs() <= tolerance * size.clamp(min=1e-300)
    return dtype == other_dtype and bool(agree | ~torch.isfinite(size) & ~torch.isfinite(other_size))


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal values, where nan equals nan."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        return same_values(one.to_dense(), other.to_dense())
    if one.dtype is not torch.complex32 and torch.equal(one, other):  # which torch does not compare
        return True
    if one.is_complex():  # a nan part leaves the other its value
        return same_values(torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj()))
    one, other = computable(one), computable(other)
    return one.is_floating_point() and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def add_grads(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two parts of one gradient, in float32 for half precision; None is no part, which is not zero."""
    if one is None or other is None:
        return other if one is None else one
    with without_function_modes():
        one, other = widened(one), widened(other)
        if one.is_sparse and not other.is_sparse:  # torch adds them in the other order only
            one, other = other, one
        return torch.add(one, other)
