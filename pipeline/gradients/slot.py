"""The sum of the contributions to one parameter: each is added as it comes.

    add(g) ...  -->  sum

A sum is as wide as the widest of the parameter and its contributions, and float32 where that is half precision.
Addition rounds, so the bits of a sum depend on the order in which contributions come.
"""

from __future__ import annotations

from functools import reduce
from threading import Lock

import torch
from torch import Tensor

from pipeline.common.arguments import shown

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class GradientSum:
    """The sum of one parameter. `add` may be called from several threads at once, all other methods from one.

    Args:
        param: the parameter.
        densify: whether sparse and dense contributions may be added; their sum is dense.
    """

    __slots__ = ("param", "sum", "_densify", "_lock")

    def __init__(self, param: Tensor, densify: bool) -> None:
        self.param = param
        self.sum: Tensor | None = None
        self._densify = densify
        self._lock = Lock()

    def add(self, grad: Tensor) -> None:
        """Add a copy of a contribution."""
        with self._lock:
            self._check_layout(grad)
            if self.sum is None:
                self.sum = grad.to(sum_dtype(self.param.dtype, grad.dtype), copy=True)
            else:
                self.sum = plus(self.sum, grad)

    def check_take(self, grad: Tensor) -> None:
        """Raise what `take` would raise, without a change."""
        self._check_layout(grad)
        check_shape(self.param, grad)

    def take(self, grad: Tensor) -> None:
        """Add the sum of another store's slot of this parameter, and take over its memory."""
        if self.sum is None:
            self.put(grad)
        else:
            self.sum = plus(self.sum, grad)

    def put(self, grad: Tensor | None) -> None:
        """Replace the sum by `grad`, without a copy."""
        self.sum = grad if grad is None else grad.to(sum_dtype(self.param.dtype, grad.dtype))

    def _check_layout(self, grad: Tensor) -> None:
        if not self._densify and self.sum is not None and self.sum.sparse_dim() != grad.sparse_dim():
            raise TypeError(mixed_layouts(self.param))


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of some types; for half precision the single one."""
    dtype = reduce(torch.promote_types, dtypes)
    return _WIDER.get(dtype, dtype)


def as_grad_of(param: Tensor, grad: Tensor) -> Tensor:
    """A gradient in the type that the parameter's `.grad` has: the parameter's own, or that which it asks for."""
    dtype = getattr(param, "grad_dtype", param.dtype)  # None: any will do
    return grad if dtype is None else grad.to(dtype)


def plus(one: Tensor, other: Tensor) -> Tensor:
    """one + other where `one` is, in place if that keeps its layout and type; of several layouts the sum is dense."""
    dtype, other = sum_dtype(one.dtype, other.dtype), other.to(one.device)
    if one.is_sparse and one.sparse_dim() != other.sparse_dim():
        return other.to_dense().to(dtype) + one.to(dtype)
    return one.to(dtype).add_(other.to(dtype))


def mixed_layouts(param: Tensor) -> str:
    """The error text for sparse and dense gradients of one parameter."""
    return (
        f"a parameter of shape {list(param.shape)} got sparse and dense gradients, or such as are sparse in several "
        "ways. Their sum would be dense, which sparse='error' refuses: make all of them alike, or use sparse='densify'."
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
    if grad.layout != param.layout and not grad.is_sparse:
        raise TypeError(
            f"the gradient is of layout {grad.layout}, the parameter of {param.layout}. Give grad.to_dense(), or "
            "grad.to_sparse_coo()."
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
    """The tensors of which a gradient consists."""
    return (grad._indices(), grad._values()) if grad.is_sparse else (grad,)
