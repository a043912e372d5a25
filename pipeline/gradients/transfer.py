"""The transfer of gradients between a store and `.grad`.

    .grad  --move_grads-->  slots  --assign-->  .grad
                                   --step-->    .grad, one optimizer.step(), None

Each tensor is moved: afterwards one side holds it alone. A sum is cast to its parameter's type here, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.common.arguments import check_optimizer
from pipeline.gradients.keys import Keys
from pipeline.gradients.slot import check_grad, plus


def move_grads(keys: Keys) -> None:
    """Move `.grad` of all parameters into their slots, or nothing if one is no gradient."""
    pairs = [(slot, grad) for slot in keys.slots.values() if (grad := slot.param.grad) is not None]
    for slot, grad in pairs:
        check_grad(slot.param, grad)
    seen: set[int] = set()
    for slot, grad in pairs:
        slot.put(_owned(grad, seen))
        slot.param.grad = None


def assign(keys: Keys, mode: str) -> None:
    """Move all sums to `.grad`: "set" it, or "add" to it."""
    for slot, grad in list(keys.filled()):
        param = slot.param
        total = grad if mode == "set" or param.grad is None else plus(param.grad, grad)
        dtype = getattr(param, "grad_dtype", param.dtype)  # None: any will do
        param.grad = total.to(param.device, total.dtype if dtype is None else dtype)
    keys.clear()


def step(keys: Keys, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step with all sums. If it fails the slots keep them."""
    grads = dict(keys.filled())
    if not grads:
        raise RuntimeError(
            "the GradStore is empty: there is nothing to step with. It was applied already, or nothing was added: run "
            "a backward pass first."
        )
    check_optimizer(optimizer)
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    foreign = [slot.param for slot in grads if id(slot.param) not in params]
    if foreign:
        raise ValueError(
            f"the optimizer does not hold {len(foreign)} of the {len(grads)} parameters in the store, the first of "
            f"shape {list(foreign[0].shape)}. Give it all of them, or pop() those that stay as they are."
        )
    stale = [param for param in params.values() if param.grad is not None]
    if stale:
        raise ValueError(
            f"{len(stale)} parameters of the optimizer have a .grad already (the first of shape "
            f"{list(stale[0].shape)}), which the step would use too. Call optimizer.zero_grad(), or "
            "store.assign('add') and optimizer.step()."
        )
    assign(keys, "set")
    try:
        optimizer.step()
    except BaseException:
        for slot, grad in grads.items():
            slot.put(grad)
        raise
    finally:
        optimizer.zero_grad(set_to_none=True)


def _owned(grad: Tensor, seen: set[int]) -> Tensor:
    """The gradient, or a copy where another tensor shares its memory.

    DistributedDataParallel's gradients can be views of a bucket, even of a whole one, which it writes again.
    """
    if grad.is_sparse:
        return grad
    storage = grad.untyped_storage()
    is_shared = grad._is_view() or storage.nbytes() != grad.numel() * grad.element_size() or storage.data_ptr() in seen
    seen.add(storage.data_ptr())
    return grad.clone() if is_shared else grad
