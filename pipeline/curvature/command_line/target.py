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

__all__ = ["MATRICES", "operator_of"]

MATRICES: dict[str, type[Operator]] = {
    "hessian": Hessian, "gauss-newton": GaussNewton, "fisher": EmpiricalFisher
}  # fmt: skip


def operator_of(options: SimpleNamespace) -> Operator:
    """The operator that a command names.

    Raises:
        CommandError: there is no such file, module or name; or it is nothing to make an operator from.
    """
    given = value_at(options.target, (Operator,))
    if isinstance(given, Operator):
        return _as_it_is(options, given)
    words: dict[str, Any] = _words(options.target, given)
    if options.params is not None:
        words["params"] = options.params
    if options.train_mode:
        words["training"] = True
    words.setdefault("seed", options.seed)
    _refuse_whole_on_each(options.target, words.get("model"))
    try:
        return MATRICES[options.matrix or "hessian"](**words)
    except TypeError as error:
        if "argument" not in str(error):  # of the call itself
            raise
        raise CommandError(f"{options.target} gives a dict that does not fit: {error}. Its keys are arguments of "
                           "pipeline.curvature.Hessian: model, data, loss_fn, params, training, ...") from error


def _as_it_is(options: SimpleNamespace, operator: Operator) -> Operator:
    others = {"--matrix": options.matrix, "--params": options.params, "--train-mode": options.train_mode or None}
    given = [option for option, value in others.items() if value is not None]
    if given:
        raise CommandError(
            f"{options.target} gives an operator, {operator!r}, which leaves nothing to say for {', '.join(given)}. "
            "Drop them, or return (model, data, loss_fn)."
        )
    _refuse_whole_on_each(options.target, operator.pipe)
    return operator


def _words(target: str, given: Any) -> dict[str, Any]:
    """The arguments of an operator."""
    if isinstance(given, dict):
        return dict(given)
    if isinstance(given, tuple) and len(given) == 3:
        return dict(zip(("model", "data", "loss_fn"), given, strict=True))
    what = f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple) else "")
    raise CommandError(
        f"{target} gives {what}. Return (model, data, loss_fn), a dict of an operator's arguments, or an operator."
    )


def _refuse_whole_on_each(target: str, model: Any) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    is_cut = isinstance(model, Pipe) and model.runtime.topology is not None
    if ranks > 1 and isinstance(model, nn.Module) and not is_cut:
        raise CommandError(
            f"there are {ranks} processes, and {target} gives a model that each of them has whole. Return a Pipe, "
            "Pipe(model, balance, chunks), without devices=; or run it without torchrun."
        )
