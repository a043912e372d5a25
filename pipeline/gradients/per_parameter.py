"""A step of an ordinary optimizer on one parameter, with the same state, groups and schedulers.

    gradient --> param.grad;  optimizer.param_groups = [its group, with params = [param]]  -->  optimizer.step()

For optimizers that treat each parameter by itself this is, to the bit, what one step on all of them does to it. Those
that combine several (L-BFGS, Prodigy, SAM) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

_COUPLED = (torch.optim.LBFGS,)
_HINT = (
    "Updates during the backward are made one parameter at a time, so the optimizer must treat each by itself, as "
    "those of torch.optim do, but for LBFGS."
)


class PerParameterOptimizer:
    """Steps an optimizer on one parameter at a time.

    Args:
        optimizer: of torch.optim, or one that treats each parameter by itself.
        separable: the caller asserts that it does; only used for optimizers that are not torch's.

    Raises:
        ValueError: it combines several parameters, or may do so.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, separable: bool = False) -> None:
        check_separable(optimizer, separable)
        self.optimizer = optimizer
        self._groups: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        """Begin a step: read the groups again, which may have changed.

        Raises:
            RuntimeError: the optimizer has step hooks, which would run once for each parameter.
        """
        hooks = (
            self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
        )  # fmt: skip
        if any(hooks):
            raise RuntimeError(
                "the optimizer has step hooks (register_step_pre_hook or register_step_post_hook), which would run "
                "once for each parameter. Remove them, or step with the optimizer itself."
            )
        groups = self.optimizer.param_groups
        self._groups = {id(param): group for group in groups for param in group["params"]}

    def __contains__(self, param: Tensor) -> bool:
        return id(param) in self._groups

    @property
    def params(self) -> Iterator[Tensor]:
        """All parameters of the optimizer."""
        return (param for group in self.optimizer.param_groups for param in group["params"])

    def step(self, param: Tensor, grad: Tensor) -> None:
        """Update one parameter. Its `.grad` is None afterwards."""
        group, groups = self._groups[id(param)], self.optimizer.param_groups
        params = group["params"]
        param.grad = grad if grad.dtype == param.dtype else grad.to(param.dtype)
        group["params"], self.optimizer.param_groups = [param], [group]
        try:
            self.optimizer.step()
        finally:
            group["params"], self.optimizer.param_groups = params, groups
            param.grad = None


def check_separable(optimizer: torch.optim.Optimizer, separable: bool) -> None:
    """Raise if an optimizer may look at several parameters at once."""
    name = type(optimizer).__name__
    if isinstance(optimizer, _COUPLED):
        raise ValueError(f"{name} looks at all parameters at once, and its step wants a closure. {_HINT}")
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    if separable or step.__module__.startswith("torch.optim."):
        return
    raise ValueError(
        f"{name}.step is not one of torch.optim's: it may look at several parameters at once, as Prodigy, D-Adaptation "
        f"and SAM do. {_HINT} If this one does so, say it: EagerUpdate(optimizer, separable=True)."
    )
