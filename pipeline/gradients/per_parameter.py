"""A step of an ordinary optimizer on one parameter, with the same state, groups and schedulers.

    gradient --> param.grad;  optimizer.param_groups = [its group, with params = [param]]  -->  optimizer.step()

For optimizers that treat each parameter by itself this is, to the bit, what one step on all of them does to it. Those
that combine several (L-BFGS, Prodigy, SAM) are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

_HINT = (
    "Updates during the backward are made one parameter at a time, so the optimizer must treat each by itself, as "
    "those of torch.optim do, but for LBFGS."
)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by its id, as a step begins.

    Raises:
        RuntimeError: the optimizer has step hooks, which would run once for each parameter.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
    )  # fmt: skip
    if any(hooks):
        raise RuntimeError(
            "the optimizer has step hooks (register_step_pre_hook or register_step_post_hook), which would run "
            "once for each parameter. Remove them, or step with the optimizer itself."
        )
    return {id(param): group for group in optimizer.param_groups for param in group["params"]}


def step_one(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
    """Update one parameter, which is in this group and of the gradient's type. Its `.grad` is None afterwards."""
    params, groups = group["params"], optimizer.param_groups
    param.grad = grad
    group["params"], optimizer.param_groups = [param], [group]
    try:
        optimizer.step()
    finally:
        group["params"], optimizer.param_groups = params, groups
        param.grad = None


def steps_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is one of torch.optim's: but for LBFGS's, they treat each parameter by itself."""
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    return bool(step.__module__.startswith("torch.optim."))


def check_separable(optimizer: torch.optim.Optimizer, separable: bool) -> None:
    """Raise ValueError if an optimizer may look at several parameters at once.

    `separable`: the caller asserts that one which is not torch's does not.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{name} looks at all parameters at once, and its step wants a closure. {_HINT}")
    if separable or steps_as_torch(optimizer):
        return
    raise ValueError(
        f"{name}.step is not one of torch.optim's: it may look at several parameters at once, as Prodigy, D-Adaptation "
        f"and SAM do. {_HINT} If this one does so, say it: EagerUpdate(optimizer, separable=True)."
    )
