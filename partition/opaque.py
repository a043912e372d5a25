"""Objects that torch's pytrees do not take apart: what is in them crosses no stage, and no part of a model sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter


def opaque(leaves: Iterable[Any]) -> list[Any]:
    """Those of some leaves that hold tensors, the first of each type.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> opaque([torch.zeros(2), "a word", SimpleNamespace(loss=None), SimpleNamespace(loss=torch.zeros(2))])
        [namespace(loss=tensor([0., 0.]))]
    """
    found: dict[type, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor | nn.Module | type) or type(leaf) in found:
            continue
        if any(isinstance(value, Tensor) for value in tree_iter(_contents(leaf))):
            found[type(leaf)] = leaf
    return list(found.values())


def _contents(leaf: Any) -> list[Any]:
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    slots = [name for kind in type(leaf).__mro__ for name in _words(vars(kind).get("__slots__", ()))]
    return [*getattr(leaf, "__dict__", {}).values(), *[getattr(leaf, name, None) for name in slots]]


def _words(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def named(leaf: Any) -> str:
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
