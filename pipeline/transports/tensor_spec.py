"""The specs of tensors in a message, and the conversion of tensors to ones that can be sent.

    tensors --sendable--> those that can be sent --spec_of--> StridedSpec(dtype, shape, stride) | SparseSpec(...) | None
                                                 --memories--> the tensors in memory that they are made of

Strides stay as they are, and the offset in a cache line: a dense tensor travels as its memory lies there; an expanded
one (the gradient of a sum) or one with gaps as the span of memory that it covers. Where most of that would be gaps, its
numbers travel side by side, and lie with the gaps again on arrival. A sparse tensor (COO) travels as its indices and
values; one of a compressed layout (CSR, CSC, BSR, BSC) is refused, with the conversion to COO as remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.accelerators import is_accelerator
from pipeline.data.pytrees import line_offset, span_of

_STRIDED = torch.strided
_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class StridedSpec(NamedTuple):
    """The spec of a tensor in memory.

    Attributes:
        offset: in a cache line, where it begins, in numbers.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def span(self) -> int:
        """The span of its memory, in numbers: more than it has where there are gaps, less where it is expanded."""
        return span_of(self.shape, self.stride)

    @property
    def has_wide_gaps(self) -> bool:
        """Whether most of that span is gaps, which do not travel."""
        return self.span > 2 * prod(self.shape)


class SparseSpec(NamedTuple):
    """The spec of a sparse COO tensor."""

    shape: tuple[int, ...]
    coalesced: bool
    indices: StridedSpec
    values: StridedSpec


TensorSpec: TypeAlias = StridedSpec | SparseSpec | None


def sendable(tensors: Sequence[Tensor | None], label: str) -> tuple[Tensor | None, ...]:
    """The same numbers in tensors that can be sent: without a graph, conjugated and negated in memory.

    Args:
        label: how an error names them: "2F0 from rank 0 to rank 1".

    Raises:
        TypeError: a tensor cannot be sent. It says why and what to do.
    """
    return tuple([None if tensor is None else _settled(tensor, label) for tensor in tensors])


def fits(tensor: Tensor | None, spec: TensorSpec) -> bool:
    """Whether a tensor looks like that and can be sent as it is. This is asked for every tensor of every message."""
    if tensor is None or spec is None:
        return tensor is None and spec is None
    if isinstance(spec, SparseSpec):
        return type(tensor) is Tensor and tensor.is_sparse and spec_of(tensor.detach()) == spec
    return (
        type(tensor) is Tensor
        and tensor.dtype is spec.dtype
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and tensor.shape == spec.shape
        and tensor.stride() == spec[2]
        and line_offset(tensor) == spec[3]
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def spec_of(tensor: Tensor) -> StridedSpec | SparseSpec:
    """The spec of a settled tensor."""
    if tensor.layout is _STRIDED:
        return _in_memory(tensor)
    return SparseSpec(tuple(tensor.shape), tensor.is_coalesced(), *map(_in_memory, _components(tensor)))


def part_specs(spec: TensorSpec) -> tuple[StridedSpec, ...]:
    """The specs of the tensors in memory of which it is made."""
    if spec is None:
        return ()
    return spec[2:] if isinstance(spec, SparseSpec) else (spec,)


def memories(tensors: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """The tensors in memory of which settled tensors are made, one after the other."""
    for tensor in tensors:
        if tensor is not None and tensor.layout is _STRIDED:
            yield tensor
        elif tensor is not None:
            yield from _components(tensor)


def built(spec: StridedSpec | SparseSpec, parts: Iterator[Tensor]) -> Tensor:
    """The tensor made of the next tensors in memory."""
    if isinstance(spec, StridedSpec):
        return next(parts)
    indices, values = next(parts), next(parts)
    tensor = torch.sparse_coo_tensor(indices, values, spec.shape, device=indices.device, check_invariants=False)
    return tensor._coalesced_(spec.coalesced)


def _settled(tensor: Tensor, label: str) -> Tensor:
    tensor = tensor.detach()
    reason = _unsendable(tensor)
    if reason is not None:
        raise TypeError(f"{label} holds {reason}")
    if tensor.layout is not _STRIDED:
        return tensor
    return tensor.resolve_conj().resolve_neg()


def _unsendable(tensor: Tensor) -> str | None:
    """The reason why a tensor cannot be sent."""
    if type(tensor) is not Tensor:
        kind = type(tensor)
        return (
            f"a {kind.__module__}.{kind.__qualname__}, and only plain tensors are sent to another rank: a subclass "
            "would arrive without what it adds. Return its parts as plain tensors; of a state save the part of each "
            "rank, pipe.state_dict()."
        )
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}), which is not sent to another rank. Return tensor.dequantize()."
    if tensor.is_nested:
        return (
            "a nested tensor, which is not sent to another rank. Return torch.nested.to_padded_tensor(tensor, 0.0) "
            "and the lengths."
        )
    if tensor.layout in _COMPRESSED:
        return f"a tensor of layout {tensor.layout}, which is not sent to another rank. Return tensor.to_sparse_coo()."
    if tensor.layout is not _STRIDED and not tensor.is_sparse:
        return f"a tensor of layout {tensor.layout}, which is not sent to another rank. Return tensor.to_dense()."
    if tensor.device.type != "cpu" and not is_accelerator(tensor.device):
        return f"a tensor on {tensor.device}, and only what is on the CPU or an accelerator is sent to another rank."
    return None


def _in_memory(tensor: Tensor) -> StridedSpec:
    return StridedSpec(tensor.dtype, tuple(tensor.shape), tensor.stride(), line_offset(tensor))


def _components(tensor: Tensor) -> list[Tensor]:
    """The indices and values of a sparse tensor, each settled."""
    tensor = tensor.detach()
    return [_settled(part, "a sparse tensor") for part in (tensor._indices(), tensor._values())]
