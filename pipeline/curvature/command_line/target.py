"""The operator that the argument `train.py:build` names.

    FILE.py:NAME   --import-->  what NAME is  --called, if it can be-->  (model, data, loss_fn)
    MODULE:NAME                                                          {"model": ..., "data": ..., ...}
                                                                         an operator
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from pipeline.curvature.command_line.request import MATRICES, Request, Target
from pipeline.curvature.operators import EmpiricalFisher, GaussNewton, Hessian, Operator
from pipeline.pipe import Pipe
from scheduler.command_line.running import CommandError

__all__ = ["operator_of"]

_CLASSES: dict[str, type[Operator]] = dict(zip(MATRICES, (Hessian, GaussNewton, EmpiricalFisher), strict=True))


def operator_of(request: Request) -> Operator:
    """The operator that a command names.

    Raises:
        CommandError: there is no such file, module or name; or it is nothing to make an operator from.
    """
    of = request.of
    given = _value_at(of.target)
    if isinstance(given, Operator):
        return _as_it_is(of, given)
    words: dict[str, Any] = _words(of.target, given)
    if of.params is not None:
        words["params"] = of.params
    if of.train_mode:
        words["training"] = True
    words.setdefault("seed", request.seed)
    _refuse_whole_on_each(of.target, words.get("model"))
    try:
        return _CLASSES[of.matrix or "hessian"](**words)
    except TypeError as error:
        if "argument" not in str(error):  # of the call itself
            raise
        raise CommandError(f"{of.target} gives a dict that does not fit: {error}. Its keys are arguments of "
                           "pipeline.curvature.Hessian: model, data, loss_fn, params, training, ...") from error


def _as_it_is(of: Target, operator: Operator) -> Operator:
    others = {"--matrix": of.matrix, "--params": of.params, "--train-mode": of.train_mode or None}
    given = [option for option, value in others.items() if value is not None]
    if given:
        raise CommandError(
            f"{of.target} gives an operator, {operator!r}, which leaves nothing to say for {', '.join(given)}. Drop "
            "them, or return (model, data, loss_fn)."
        )
    _refuse_whole_on_each(of.target, operator.pipe)
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


def _value_at(target: str) -> Any:
    """The object that a target names; if it is a function, its result."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise CommandError(f"{target!r} is no target. Give FILE.py:NAME or MODULE:NAME, such as train.py:build.")
    module = _script(Path(where)) if where.endswith(".py") else _module(where)
    if name not in vars(module):
        raise CommandError(f"{where} has no {name!r}. It has {_public(module)}.")
    given = getattr(module, name)
    return given() if callable(given) and not isinstance(given, Operator) else given


def _script(path: Path) -> ModuleType:
    """A script's module; what stands beside it can be imported, as where it is run."""
    if not path.is_file():
        raise CommandError(f"there is no file {path}.")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    shadowed = sys.modules.get(path.stem)
    if shadowed is None:
        sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise CommandError(f"there is no module {name}. Name a script with its suffix: {name}.py:NAME.") from None
        raise


def _public(module: ModuleType) -> str:
    own = [
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(own[:12]) or "no names of its own"
