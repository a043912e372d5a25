"""Targets of commands: what `train.py:build` names.

    FILE.py:NAME   --import-->  what NAME is  --called, if it is a function-->  value
    MODULE:NAME
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from scheduler.command_line.running import CommandError


def value_at(target: str, values: tuple[type, ...] = ()) -> Any:
    """The object that a target names; if it can be called, its result.

    Args:
        target: FILE.py:NAME or MODULE:NAME
        values: types that are what is asked for, though they can be called

    Raises:
        CommandError: there is no such file, module or name.
    """
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise CommandError(f"{target!r} is no target. Give FILE.py:NAME or MODULE:NAME, such as train.py:build.")
    module = _script(Path(source)) if source.endswith(".py") else _module(source)
    if name not in vars(module):
        raise CommandError(f"{source} has no {name!r}. It has {_public(module)}.")
    value = getattr(module, name)
    return value() if callable(value) and not isinstance(value, values) else value


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
    names = [
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(names[:12]) or "no names of its own"
