"""The operator that the argument `train.py:build` names.

    FILE.py:NAME   --import-->  what NAME is  --called, if it can be-->  (model, data, loss_fn)
    MODULE:NAME                                                          {"model": ..., "data": ..., ...}
                                                                         an operator
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from torch import nn

from pipeline.curvature.operators import EmpiricalFisher, GaussNewton, Hessian, Operator
from pipeline.pipe import Pipe
from scheduler.command_line.running import CommandError
from scheduler.command_line.targets import value_at

MATRICES: dict[str, type[Operator]] = {
    "hessian": Hessian, "gauss-newton": GaussNewton, "fisher": EmpiricalFisher
}  # fmt: skip


def operator_of(options: SimpleNamespace) -> Operator:
    """The operator that a command names.

    Raises:
        CommandError: there is no such file, module or name; or it is nothing to make an operator from.
    """
    value = value_at(options.target, (Operator,))
    if isinstance(value, Operator):
        return _unchanged(options, value)
    arguments: dict[str, Any] = _arguments_of(options.target, value)
    if options.params is not None:
        arguments["params"] = options.params
    if options.train_mode:
        arguments["training"] = True
    arguments.setdefault("seed", options.seed)
    _refuse_unsharded(options.target, arguments.get("model"))
    try:
        return MATRICES[options.matrix or "hessian"](**arguments)
    except TypeError as error:
        if "argument" not in str(error):  # of the call itself
            raise
        raise CommandError(f"{options.target} gives a dict that does not fit: {error}. Its keys are arguments of "
                           "pipeline.curvature.Hessian: model, data, loss_fn, params, training, ...") from error


def _unchanged(options: SimpleNamespace, operator: Operator) -> Operator:
    settings = {"--matrix": options.matrix, "--params": options.params, "--train-mode": options.train_mode or None}
    conflicts = [option for option, setting in settings.items() if setting is not None]
    if conflicts:
        raise CommandError(
            f"{options.target} gives an operator, {operator!r}, which leaves nothing to say for "
            f"{', '.join(conflicts)}. Drop them, or return (model, data, loss_fn)."
        )
    _refuse_unsharded(options.target, operator.pipe)
    return operator


def _arguments_of(target: str, value: Any) -> dict[str, Any]:
    """The arguments of an operator."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple) and len(value) == 3:
        return dict(zip(("model", "data", "loss_fn"), value, strict=True))
    description = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")
    raise CommandError(
        f"{target} gives {description}. Return (model, data, loss_fn), a dict of an operator's arguments, or an "
        "operator."
    )


def _refuse_unsharded(target: str, model: Any) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    is_cut = isinstance(model, Pipe) and model.runtime.topology is not None
    if ranks > 1 and isinstance(model, nn.Module) and not is_cut:
        raise CommandError(
            f"there are {ranks} processes, and {target} gives a model that each of them has whole. Return a Pipe, "
            "Pipe(model, balance, chunks), without devices=; or run it without torchrun."
        )
