"""Checks of arguments that several entry points share. Each error names the argument, its value, and what to give.

    check_flags(trace="no")             TypeError: trace is 'no'. Use True or False.
    check_limit("max_norm", -1)         ValueError: max_norm is -1. Give a number above 0.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from math import isnan
from numbers import Real
from os import PathLike
from typing import Any

from torch import Tensor, distributed

from scheduler.errors import whole

_OPTIMIZER = ("param_groups", "step", "zero_grad")
_SCALER = ("scale", "unscale_", "step", "update", "get_scale", "is_enabled")
_LONGEST = 60


def shown(value: object) -> str:
    """A value in one line of an error.

    Example:
        >>> shown("world"), shown([0] * 99), shown(int)
        ("'world'", 'a list', 'the class int')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if "\n" not in text and len(text) <= _LONGEST else f"a {type(value).__name__}"


def few(names: Collection[str]) -> str:
    """Some names in an error: the first five, and how many more.

    Example:
        >>> few(["a", "b"]), few("abcdefg")
        ('a, b', 'a, b, c, d, e and 2 more')
    """
    first = ", ".join(islice(names, 5))
    return f"{first} and {len(names) - 5} more" if len(names) > 5 else first


def check_flags(**flags: object) -> None:
    """Raise TypeError unless all of these are True or False: `"no"` would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)}. Use True or False.")


def check_count(name: str, value: object, least: int = 1) -> int:
    """A whole number, as an int.

    Raises:
        TypeError: it is none.
        ValueError: it is less than `least`.
    """
    count = whole(value)
    if count is None or count < least:
        kind = TypeError if count is None else ValueError
        raise kind(f"{name} is {shown(value)}. Give a whole number of at least {least}.")
    return count


def check_limit(name: str, value: Any) -> None:
    """Raise unless a value is a number above 0 (inf is one).

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0, or nan.
    """
    if not check_number(name, value) > 0:
        raise ValueError(f"{name} is {shown(value)}. Give a number above 0.")


def check_factor(value: Any) -> None:
    """Raise unless gradients can be multiplied by a value: a number that is not nan, or a tensor of one."""
    if isinstance(value, Tensor) and not value.is_nested and value.numel() == 1 and not value.is_complex():
        return  # on any device: its value is not read
    if isnan(check_number("factor", value)):
        raise ValueError("factor is nan, so every gradient would be nan. Give a number.")


def check_number(name: str, value: Any) -> float:
    """A real number, or a tensor of one, as a float; TypeError for anything else."""
    if isinstance(value, Tensor) and not value.is_nested and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}. Give a number.")
    return float(value)


def check_path(name: str, value: object) -> None:
    """Raise TypeError unless a value is a path: `True`, say, is no name of a file."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} is {shown(value)}. Give a path: a str, or a pathlib.Path.")


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless this is an optimizer: torch's, or an object with groups of parameters and a step."""
    if isinstance(optimizer, type):
        raise TypeError(
            f"the optimizer is {shown(optimizer)}. Give an object of it, such as "
            f"{optimizer.__name__}(pipe.parameters(), lr=0.01)."
        )
    if not all([hasattr(optimizer, name) for name in _OPTIMIZER]):
        several = " To step with several, step with none (optimizer=None) and call each one's step() afterwards."
        raise TypeError(
            f"the optimizer is {shown(optimizer)}. Give a torch optimizer, such as "
            f"torch.optim.SGD(pipe.parameters(), lr=0.01).{several if isinstance(optimizer, list | tuple) else ''}"
        )


def check_scaler(scaler: Any) -> None:
    """Raise TypeError unless this is a GradScaler or has its methods."""
    if isinstance(scaler, type) or not all([hasattr(scaler, name) for name in _SCALER]):
        raise TypeError(f"the scaler is {shown(scaler)}. Give a torch.amp.GradScaler(...), or None.")


def check_group(group: Any, name: str = "group") -> None:
    """Raise TypeError unless this is a group of ranks, or None."""
    if group is None or hasattr(group, "get_group") and not isinstance(group, type):  # a DeviceMesh
        return
    if not distributed.is_available() or not (
        isinstance(group, distributed.ProcessGroup) or group is distributed.GroupMember.NON_GROUP_MEMBER
    ):
        raise TypeError(
            f"{name} is {shown(group)}. Give a ProcessGroup (torch.distributed.new_group(ranks)) or a "
            "DeviceMesh of one dimension; None is all ranks."
        )
