"""Objects that torch's pytrees do not take apart: what is in them crosses no stage, and no part of a model sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

_LASTING = (nn.Module, Enum, type, slice, range, frozenset, complex, bytes)


class Opaque:
    """Stands for any such object. It has nothing that could be read, so what reads one fails."""


def seen_of(leaf: Any) -> Any:
    """The plain value that a leaf is; Tensor for a tensor, Opaque for any other object.

    Example:
        >>> [seen_of(leaf) for leaf in (2.0, None, nn.Parameter(), {1})] == [2.0, None, Tensor, Opaque]
        True
    """
    if isinstance(leaf, Tensor):
        return Tensor
    return leaf if leaf is None or isinstance(leaf, int | float | str) else Opaque


def opaque(leaves: Iterable[Any]) -> list[Any]:
    """Those of some leaves that are neither tensors nor plain values, the first of each type.

    Example:
        >>> opaque([None, "a word", {1}, 2.0, {2}, range(3)])
        [{1}, range(0, 3)]
    """
    found: dict[type, Any] = {}
    for leaf in leaves:
        if seen_of(leaf) is Opaque:
            found.setdefault(type(leaf), leaf)
    return list(found.values())


def may_change(leaf: Any) -> bool:
    """Whether a function that is called with a leaf may write into it, or by it. Of tensors torch counts that.

    Example:
        >>> [may_change(leaf) for leaf in ({1}, 2.0, [].append, slice(3))]
        [True, False, True, False]
    """
    is_torch = type(leaf).__module__.partition(".")[0] == "torch"
    return seen_of(leaf) is Opaque and not is_torch and not isinstance(leaf, _LASTING)


def type_name(leaf: Any) -> str:
    """The type of an object, in words."""
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def remedy(leaf: Any) -> str:
    """The way to a value that is taken apart.

    Example:
        >>> remedy({"a": 1}.keys())
        'register it as a pytree node (torch.utils._pytree.register_pytree_node), or return its parts'
    """
    if type(leaf).__module__ == "numpy":
        return "make it a tensor with torch.from_numpy"
    if isinstance(leaf, Mapping):
        return "make it a dict with dict(...)"
    if is_dataclass(leaf):
        return (
            f"register it, torch.utils._pytree.register_dataclass({type(leaf).__qualname__}), once in each process, or "
            "return its parts"
        )
    return "register it as a pytree node (torch.utils._pytree.register_pytree_node), or return its parts"
