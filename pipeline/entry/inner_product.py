"""Inner products over all parameters, of which a rank has a part: `pipe.dot`, `pipe.grad_norm`.

    a, b: a tensor for each parameter of this rank --> <a_p, b_p> --those that count here--> sum over the ranks
    backward: the sum is the same on all ranks and counts once, so each rank's terms get its gradient as it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import shown
from pipeline.common.call_lock import turn
from pipeline.entry.runtime import Runtime

PartialGrads = Sequence[Tensor | None]


def dot(runtime: Runtime, one: PartialGrads, other: PartialGrads) -> Tensor:
    """`pipe.dot`."""
    with turn(), runtime.communicator("dot") as communicator:
        owners = _owners(runtime, one, other)
        communicator.open(lambda values: {"the arguments": "tensors of parameters"}, draws=False)
        remote_ids = {id(copy) for tied, copy in runtime.tied().items() if tied.owner != runtime.rank}
        terms, counts = [], []
        for owner, left, right in zip(owners, one, other, strict=True):
            if left is not None and right is not None:
                terms.append(_term(left, right))
                counts.append(id(owner) not in remote_ids)
        nothing = torch.zeros((), device="cpu").requires_grad_()
        total: Tensor = _Sum.apply(  # type: ignore[no-untyped-call]
            communicator.exchange.sum_over, counts, nothing, *terms
        )
        return total


def grad_norm(runtime: Runtime, grads: PartialGrads) -> Tensor:
    """`pipe.grad_norm`."""
    square = dot(runtime, grads, grads)
    is_zero = square == 0  # where the derivative of the root is infinite, and that of the norm is taken for 0
    return torch.where(is_zero, square, torch.where(is_zero, torch.ones_like(square), square).sqrt())


def _owners(runtime: Runtime, one: PartialGrads, other: PartialGrads) -> list[Tensor]:
    """The parameters that the tensors belong to.

    Raises:
        TypeError: no list of them was given.
        ValueError: their numbers differ, or a shape does.
    """
    for grads in (one, other):
        if not isinstance(grads, Sequence):
            raise TypeError(f"the tensors are {shown(grads)}. Give a list with one for each of pipe.parameters().")
    parameters: list[Tensor] = list(runtime.module.parameters())
    trained = [owner for owner in parameters if owner.requires_grad]
    owners = parameters if len(one) == len(parameters) else trained
    if not len(one) == len(other) == len(owners):
        raise ValueError(
            f"{len(one)} and {len(other)} tensors were given for {len(parameters)} parameters of this process, of "
            f"which {len(trained)} are trained. Give one for each of list(pipe.parameters()), in its order, or one for "
            "each that requires a gradient; None where there is none."
        )
    for owner, *pair in zip(owners, one, other, strict=True):
        for tensor in pair:
            if tensor is not None and tensor.shape != owner.shape:
                raise ValueError(
                    f"a tensor of shape {list(tensor.shape)} stands at the place of a parameter of shape "
                    f"{list(owner.shape)}. Give tensors in the order of pipe.parameters()."
                )
    return owners


def _term(one: Tensor, other: Tensor) -> Tensor:
    """The real inner product of two tensors, at least in float32."""
    return (_wide(one).conj() * _wide(other)).real.sum()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize < 4 else tensor


class _Sum(torch.autograd.Function):
    """The sum of terms over all ranks: in float64 if one of them is, else in float32.

    Where a term of any rank has a derivative, the sum has one on all: by `nothing` on a rank whose own terms have none.
    """

    @staticmethod
    def forward(
        ctx: Any, sum_over: Callable[[Tensor], Tensor], counts: Sequence[bool], nothing: Tensor, *terms: Tensor
    ) -> Tensor:
        ctx.terms = [(term.dtype, term.device) for term in terms]
        own_sum = sum([float(term) for term, is_counted in zip(terms, counts, strict=True) if is_counted])
        is_double = any([term.dtype is torch.float64 for term in terms])
        own = [own_sum, float(is_double), float(any(ctx.needs_input_grad[3:]))]
        whole, doubles, differentiable = sum_over(torch.tensor(own, dtype=torch.float64, device="cpu")).unbind()
        device = terms[0].device if terms else torch.device("cpu")
        total = whole.to(device, torch.float64 if doubles else torch.float32)
        if not differentiable:
            ctx.mark_non_differentiable(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pragma: no cover
        return None, None, None, *[grad.to(device, dtype) for dtype, device in ctx.terms]
