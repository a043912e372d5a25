"""Refusals, and a warning, where torch would take one rank's part of a Pipe's parameters for all of them.

    torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)  -->  get_total_norm of this rank's gradients  -->  error
    torch.optim.LBFGS(pipe.parameters()).step(closure)      -->  inner products of this rank's gradients  -->  error
    GradScaler().step(optimizer), .unscale_(optimizer)      -->  overflows of this rank's gradients       -->  error
    ZeroRedundancyOptimizer(pipe.parameters(), SGD).step()  -->  other ranks' layers for copies of these  -->  error
    Prodigy(pipe.parameters()), another that is not torch's -->  it may combine this rank's parameters    -->  warning

clip_grad_norm_ looks get_total_norm up when it is called, so a check in its place works however it was imported.
Gradients identify a part: lists, parameter groups and modules around the Pipe lose every other mark. One gradient alone
is refused too: it may be all that this rank has of what is chosen from the whole model, such as its weights.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad

from pipeline.gradients.per_parameter import params_of, steps_as_torch

# The Pipes that have a part of their parameters here, and the ranks that have the others.
_parts: WeakKeyDictionary[nn.Module, Sequence[int]] = WeakKeyDictionary()
_overflows_are_shared: ContextVar[bool] = ContextVar("overflows_are_shared", default=False)


def is_part(pipe: nn.Module, ranks: Sequence[int]) -> None:
    """From now on refuse operations that take this rank's part of the Pipe's parameters for all of them.

    Args:
        pipe: a Pipe over ranks.
        ranks: those of its pipeline, as the world numbers them.
    """
    if not _parts:
        _check_torch()
    _parts[pipe] = ranks


def refuse_norm(gradients: Iterable[Tensor], instead: str = "pipe.clip_grad_norm_(max_norm)") -> None:
    """Raise if some of these are gradients of a Pipe over ranks.

    Args:
        gradients: whose norm is wanted, `.grad` of parameters; or the parameters, where a store has their gradients.
        instead: what sees all ranks' gradients.
    """
    _refuse(
        gradients,
        "the norm of the gradients of {} is not that of all gradients: other ranks have the other layers of the Pipe, "
        f"and each would clip by another norm. Call {instead} on every rank: it takes the norm over all of them. (For "
        "the norm of one layer's own gradients: torch.linalg.vector_norm and torch.nn.utils.clip_grads_with_norm_.)",
    )


def refuse_verdict(params: Iterable[Tensor]) -> None:
    """Raise if what is asked about the gradients of these parameters is decided by one rank's part of a Pipe's."""
    _refuse(
        params,
        "is_finite() of the gradients of {} does not see those of the layers that other ranks have: one rank would "
        "skip the step, and another would make it. Use step(..., scaler=GradScaler(...)), which asks all ranks; or ask "
        "each rank's own gradients (torch.isfinite), and let torch.distributed.all_reduce with ReduceOp.MIN decide for "
        "all.",
    )


def refuse_lbfgs(optimizer: torch.optim.LBFGS) -> None:
    """Raise if it has parameters of a Pipe over ranks."""
    _refuse(
        params_of(optimizer),
        "LBFGS takes inner products over all parameters, and this rank has only its own layers' of the Pipe ({}): each "
        "rank would go its own way. Build the Pipe in one process (devices=[...]), or use another optimizer.",
    )


def refuse_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Raise if it has parameters stepped by other ranks of a pipeline, which have other ones."""
    if not isinstance(optimizer, _sharded()):
        return
    stepped = {id(param) for param in params_of(optimizer)}
    group = distributed.get_process_group_ranks(getattr(optimizer, "process_group"))
    for pipe, ranks in _parts.items():
        common = sorted(set(group).intersection(ranks))
        if len(common) > 1 and not stepped.isdisjoint(map(id, pipe.parameters())):
            raise RuntimeError(
                f"ZeroRedundancyOptimizer takes ranks {common} for replicas, but they have different stages of one "
                "pipeline: it would copy the parameters of one to another. Give each rank an optimizer of torch.optim, "
                "or give it the ranks that have the same stages: process_group=mesh[\"dp\"].get_group()."
            )


def _sharded() -> tuple[type, ...]:
    """Torch's optimizer of which each rank steps a part, if it was ever imported: else there is none."""
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return () if kind is None else (kind,)


def _check_group(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check the steps of an optimizer that has got a group, or warn of it where they may combine parameters."""
    for kind in _sharded():
        _checked(kind, "step", refuse_sharded)
    known = steps_as_torch(optimizer) or isinstance(optimizer, _sharded())
    names = [] if known else names_of_parts(optimizer.param_groups[-1]["params"])
    if names:
        name = type(optimizer).__name__
        warnings.warn(
            f"{name}.step is not one of torch.optim's, and of the Pipe this rank has {_listed(names)} alone. If it "
            "combines parameters, as Prodigy, D-Adaptation and SAM do, each rank goes its own way, none that of one "
            "process: build the Pipe in one process (devices=[...]), or use another optimizer. If it treats each by "
            f"itself, nothing is wrong: warnings.filterwarnings('ignore', message='{name}.step').",
            UserWarning, stacklevel=5,
        )  # fmt: skip


def names_of_parts(tensors: Iterable[Tensor]) -> list[str]:
    """The names of those that are parameters of Pipes over ranks, or their gradients."""
    ids = {id(tensor) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)} if _parts else set()
    named = [pair for pipe in _parts if ids for pair in pipe.named_parameters()]
    return [name for name, param in named if id(param) in ids or id(param.grad) in ids]


def _refuse(tensors: Iterable[Tensor], words: str) -> None:
    """Raise if there are such. `words`: with {} for the names."""
    names = names_of_parts(tensors)
    if names:
        raise RuntimeError(words.format(_listed(names)))


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 3 else [*names[:2], "...", names[-1]])


def _check_torch() -> None:
    """Put the checks before torch's total norm, every step of an L-BFGS, the making of others, and every search for
    overflows.

    They are no hooks of all optimizers, with which an EagerUpdate could not step.
    """
    _checked(clip_grad, "_get_total_norm", lambda tensors, *args, **kwargs: refuse_norm(tensors))
    setattr(torch.nn.utils, "get_total_norm", clip_grad._get_total_norm)
    _checked(torch.optim.LBFGS, "step", lambda optimizer, *args, **kwargs: refuse_lbfgs(optimizer))
    _checked(torch.optim.Optimizer, "add_param_group", _check_group, afterwards=True)
    for method in ("unscale_", "_check_inf_per_device"):  # of all optimizers but fused ones, and of these
        _checked(torch.amp.GradScaler, method, lambda scaler, optimizer: _refuse_overflows(optimizer))


def _checked(owner: Any, name: str, check: Callable[..., None], afterwards: bool = False) -> None:
    """Put a check before a function, or behind it, once in a process. What a generator yields is a list for both."""
    original = getattr(owner, name)
    if getattr(original, "checks_parts", False):
        return

    @wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(_as_list, args)), {key: _as_list(value) for key, value in kwargs.items()}
        if not afterwards:
            check(*args, **kwargs)
        result = original(*args, **kwargs)
        if afterwards:
            check(*args, **kwargs)
        return result

    setattr(checked, "checks_parts", True)
    setattr(owner, name, checked)


def _as_list(argument: Any) -> Any:
    return list(argument) if isinstance(argument, Iterator) else argument


@contextmanager
def shared_overflows() -> Iterator[None]:
    """Within: a GradScaler may look for overflows, of which all ranks are told."""
    token = _overflows_are_shared.set(True)
    try:
        yield
    finally:
        _overflows_are_shared.reset(token)


def _refuse_overflows(optimizer: torch.optim.Optimizer) -> None:
    if not _overflows_are_shared.get():
        _refuse(
            params_of(optimizer),
            "the GradScaler looks for overflows in the gradients of this rank's layers of the Pipe alone ({}): one "
            "rank would skip the step, and another would make it. Call pipe.step(x, y, loss_fn=..., "
            "optimizer=optimizer, scaler=scaler) on every rank, with clip_grad_norm= to clip: all skip an overflowing "
            "step, or none.",
        )
