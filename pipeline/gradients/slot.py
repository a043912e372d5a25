"""The accumulator of one parameter: it fixes the order and the type in which contributions are added.

    order="arrival"    add(g) ...           -->  sum: each is added as it comes
    order="index"      add(g, index) ...    -->  early: held by index  --read-->  sum: added in ascending index

A sum is as wide as the widest of the parameter and its contributions, and float32 where that is half precision.
Addition rounds, so the bits of a sum depend on its order: by index they do not depend on who came first, at the price
of holding all contributions until someone reads.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.common.arguments import shown

Index: TypeAlias = tuple[int, ...]
_HALF = (torch.float16, torch.bfloat16)


class GradientSum:
    """What one parameter got. `add` may be called from several threads at once, all else from one.

    Args:
        param: the parameter.
        by_index: whether contributions wait for a read, and are added by index then.
        densify: whether sparse and dense contributions may meet; their sum is dense.
    """

    __slots__ = ("param", "_by_index", "_densify", "_lock", "_sum", "_early", "_last")

    def __init__(self, param: Tensor, by_index: bool, densify: bool) -> None:
        self.param = param
        self._by_index = by_index
        self._densify = densify
        self._lock = Lock()
        self._sum: Tensor | None = None
        self._early: dict[Index, Tensor] = {}
        self._last: Index | None = None  # the highest index in the sum

    @property
    def is_filled(self) -> bool:
        """Whether there was a contribution."""
        return self._sum is not None or bool(self._early)

    @property
    def held(self) -> list[Tensor]:
        """All tensors that are kept: the sum, and what is to be added to it."""
        return [*([] if self._sum is None else [self._sum]), *self._early.values()]

    @property
    def sum(self) -> Tensor | None:
        """The sum of all contributions. Reading it closes the order up to the highest index."""
        if self._early:
            with self._lock:
                for index in sorted(self._early):
                    self._sum = self._with(self._early[index])
                    self._last = index
                    del self._early[index]
        return self._sum

    def add(self, grad: Tensor, index: Index | None) -> None:
        """Add a copy of a contribution."""
        with self._lock:
            self._check_layouts([grad])
            if self._by_index:
                self._check_index(index)
                self._early[index] = grad.clone()  # type: ignore[index]  # checked
            elif self._sum is None:
                self._sum = grad.to(sum_dtype(self.param, grad), copy=True)
            else:
                self._sum = plus(self._sum, grad)

    def check_take(self, other: GradientSum) -> None:
        """Raise what `take` would, with neither of the two changed."""
        self._check_layouts(other.held)
        for grad in other.held:
            check_shape(self.param, grad)
        if not self._by_index:
            return
        if other._sum is not None and self.is_filled:
            raise ValueError(
                f"the gradients of a parameter of shape {list(self.param.shape)} were summed before they were merged "
                "into a GradStore with order='index': the sum has no place among them. Use order='index' in both, and "
                "merge before you read."
            )
        for index in other._early:
            self._check_index(index)

    def take(self, other: GradientSum) -> None:
        """Add all that another slot of this parameter holds. It is used up."""
        if self._by_index:
            if other._sum is not None:
                self._sum, self._last = other._sum, other._last
            self._early.update(other._early)
        elif (grad := other.sum) is not None:
            self._sum = self._with(grad)

    def put(self, grad: Tensor | None) -> None:
        """A sum, taken over as it is, in place of all there was; what is added later follows it."""
        self._sum = grad if grad is None else grad.to(sum_dtype(self.param, grad))
        self._early = {}
        self._last = None

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor that is held by another of its value."""
        if self._sum is not None:
            self._sum = function(self._sum)
        self._early = {index: function(grad) for index, grad in self._early.items()}

    def _with(self, grad: Tensor) -> Tensor:
        """The sum, and a gradient that nobody else holds."""
        return grad.to(sum_dtype(self.param, grad)) if self._sum is None else plus(self._sum, grad)

    def _check_layouts(self, grads: list[Tensor]) -> None:
        if not self._densify and len({each.is_sparse for each in [*self.held, *grads]}) > 1:
            raise TypeError(mixed_layouts(self.param))

    def _check_index(self, index: Index | None) -> None:
        if not isinstance(index, tuple):
            raise TypeError(f"order='index' needs add_(key, grad, index=(chunk, stage)); the index is {index!r}.")
        if index in self._early:
            raise ValueError(f"a parameter got two gradients of index {index}. Add those up first, or number them.")
        if self._last is not None and index <= self._last:
            raise RuntimeError(
                f"a gradient of index {index} came after the sum up to {self._last} was read: its place in the order "
                "is gone. Read when all contributions are in."
            )


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest type of some tensors; float32 for half precision."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.float32 if dtype in _HALF else dtype


def plus(one: Tensor, other: Tensor) -> Tensor:
    """one + other where `one` is, in place if that keeps its layout and type; sparse + dense is dense."""
    dtype, other = sum_dtype(one, other), other.to(one.device)
    if one.is_sparse and not other.is_sparse:
        return other.to(dtype) + one.to(dtype)
    return one.to(dtype).add_(other.to(dtype))


def mixed_layouts(param: Tensor) -> str:
    """The words for sparse and dense gradients that meet where they may not."""
    return (
        f"a parameter of shape {list(param.shape)} got sparse and dense gradients. Their sum would be dense, which "
        "sparse='error' refuses: make all of them sparse, or use sparse='densify'."
    )


def check_grad(param: Tensor, grad: Tensor) -> None:
    """Raise where a value is no gradient of a parameter."""
    if not isinstance(grad, Tensor):
        raise TypeError(f"the gradient is {shown(grad)}. Give a tensor.")
    if not (grad.is_floating_point() or grad.is_complex()) or grad.requires_grad:
        raise TypeError(
            f"a gradient is a floating-point tensor that requires no grad; got {grad.dtype}, "
            f"requires_grad={grad.requires_grad}. Give grad.detach()."
        )
    if grad.is_complex() and not param.is_complex():
        raise TypeError(f"the gradient is {grad.dtype} but the parameter is {param.dtype}. Give grad.real.")
    if grad.device != param.device:
        raise ValueError(f"the gradient is on {grad.device}, the parameter on {param.device}. Move the gradient there.")
    check_shape(param, grad)


def check_shape(param: Tensor, grad: Tensor) -> None:
    """Raise where a gradient has another shape than its parameter: it could broadcast."""
    if grad.shape != param.shape:
        raise ValueError(f"the gradient has shape {list(grad.shape)}, the parameter {list(param.shape)}.")


def parts(grad: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a gradient is kept in."""
    return (grad._indices(), grad._values()) if grad.is_sparse else (grad,)


def values(grad: Tensor) -> Tensor:
    """Its entries; of a sparse one those that are not zero."""
    return grad.coalesce().values() if grad.is_sparse else grad
