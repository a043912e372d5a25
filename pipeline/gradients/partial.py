"""Refusals where torch would take one rank's part of a Pipe's parameters for all of them.

    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)  -->  get_total_norm of this rank's gradients  -->  error
    torch.optim.LBFGS(pipe.parameters()).step(closure)      -->  inner products of this rank's gradients  -->  error
    GradScaler().step(optimizer), .unscale_(optimizer)      -->  overflows of this rank's gradients       -->  error

clip_grad_norm_ looks get_total_norm up when it is called, so a check in its place works however it was imported.
Gradients identify a part: lists, parameter groups and modules around the Pipe lose every other mark. One gradient alone
is refused too: it may be all that this rank has of what is chosen from the whole model, such as its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

_parts: WeakSet[nn.Module] = WeakSet()  # the Pipes that have a part of their parameters here
_overflows_are_shared: ContextVar[bool] = ContextVar("overflows_are_shared", default=False)


def is_part(pipe: nn.Module) -> None:
    """From now on refuse operations that take this rank's part of the Pipe's parameters for all of them."""
    if not _parts:
        _check_norms()
        _check_optimizers()
    _parts.add(pipe)


def refuse_norm(gradients: Iterable[Tensor], instead: str = "pipe.clip_grad_norm_(max_norm)") -> None:
    """Raise if some of these are gradients of a Pipe over ranks.

    Args:
        gradients: whose norm is wanted, `.grad` of parameters; or the parameters, where a store has their gradients.
        instead: what sees all ranks' gradients.
    """
    names = _part_among(gradients)
    if names:
        raise RuntimeError(
            f"the norm of the gradients of {_few(names)} is not that of all gradients: other ranks have the other "
            f"layers of the Pipe, and each would clip by another norm. Call {instead} on every rank: it takes the "
            "norm over all of them. (For the norm of one layer's own gradients: torch.linalg.vector_norm and "
            "torch.nn.utils.clip_grads_with_norm_.)"
        )


def refuse_verdict(params: Iterable[Tensor]) -> None:
    """Raise if what is asked about the gradients of these parameters is decided by one rank's part of a Pipe's."""
    names = _part_among(params)
    if names:
        raise RuntimeError(
            f"is_finite() of the gradients of {_few(names)} does not see those of the layers that other ranks have: "
            "one rank would skip the step, and another would make it. Use step(..., scaler=GradScaler(...)), which "
            "asks all ranks; or ask each rank's own gradients (torch.isfinite), and let torch.distributed.all_reduce "
            "with ReduceOp.MIN decide for all."
        )


def _part_among(gradients: Iterable[Tensor]) -> list[str]:
    """The names of the parameters of Pipes over ranks that these are, or whose gradients."""
    ids = {id(gradient) for gradient in gradients} if _parts else set()
    named = [pair for pipe in _parts if ids for pair in pipe.named_parameters()]
    return [name for name, param in named if id(param) in ids or id(param.grad) in ids]


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def _check_norms() -> None:
    """Put the check before torch's total norm, once in a process."""
    total_norm = clip_grad._get_total_norm
    if getattr(total_norm, "checks_parts", False):
        return

    @wraps(total_norm)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        refuse_norm(tensors)
        return total_norm(tensors, *args, **kwargs)

    setattr(checked, "checks_parts", True)
    setattr(clip_grad, "_get_total_norm", checked)
    setattr(torch.nn.utils, "get_total_norm", checked)


def _check_optimizers() -> None:
    """Put the check before every step of an L-BFGS and every search for overflows, once in a process.

    It is no hook of all optimizers, with which an EagerUpdate could not step.
    """
    _checked(torch.optim.LBFGS, "step", lambda optimizer, *args, **kwargs: _refuse_lbfgs(optimizer))
    for method in ("unscale_", "_check_inf_per_device"):  # of all optimizers but fused ones, and of these
        _checked(torch.amp.GradScaler, method, lambda scaler, optimizer: _refuse_overflows(optimizer))


def _checked(kind: type, method: str, check: Callable[..., None]) -> None:
    """Put a check before a method, which is not checked yet."""
    original = getattr(kind, method)
    if getattr(original, "checks_parts", False):
        return

    @wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(checked, "checks_parts", True)
    setattr(kind, method, checked)


@contextmanager
def shared_overflows() -> Iterator[None]:
    """Within: a GradScaler may look for overflows, of which all ranks are told."""
    token = _overflows_are_shared.set(True)
    try:
        yield
    finally:
        _overflows_are_shared.reset(token)


def _refuse_overflows(optimizer: torch.optim.Optimizer) -> None:
    if not _overflows_are_shared.get() and _has_part(optimizer):
        raise RuntimeError(
            "the GradScaler looks for overflows in the gradients of this rank's layers of the Pipe alone: one rank "
            "would skip the step, and another would make it. Call pipe.step(x, y, loss_fn=..., optimizer=optimizer, "
            "scaler=scaler) on every rank, with clip_grad_norm= to clip: all skip an overflowing step, or none."
        )


def _refuse_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    if _has_part(optimizer):
        raise RuntimeError(
            "LBFGS takes inner products over all parameters, and this rank has only its own layers' of the Pipe: each "
            "rank would go its own way. Build the Pipe in one process (devices=[...]), or use another optimizer."
        )


def _has_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has parameters of a Pipe over ranks."""
    param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return any(id(param) in param_ids for pipe in _parts for param in pipe.parameters())
