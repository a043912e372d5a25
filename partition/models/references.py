"""Attributes that refer to modules and parameters, beside the tables that hold them: a list of blocks, a dict of heads.

    the model     self.blocks = [block 0, block 1]       and add_module("0", block 0), ...
    a copy of it  [stand-in 0, stand-in 1]               what stands for these in the copy's tables
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from partition.names import OF_EVERY_MODULE, STALE_MARK

_KINDS = (nn.Module, nn.Parameter)
_OF_ITS_OWN = OF_EVERY_MODULE - {"_is_full_backward_hook"} | {"forward", "_compiled_call_impl", STALE_MARK}


def references_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that refer to modules or parameters, in lists, tuples and dicts."""
    attributes = vars(module).items()
    return {
        key: value for key, value in attributes
        if key not in OF_EVERY_MODULE and any(isinstance(leaf, _KINDS) for leaf in tree_leaves(value))
    }  # fmt: skip


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that refer to no module or parameter: what a copy of it may have as well."""
    return {key: value for key, value in vars(module).items() if key not in _OF_ITS_OWN and is_setting(value)}


def is_setting(value: Any) -> bool:
    """Whether a value refers to no module or parameter: nor is it a function that is bound to one."""
    return not any(isinstance(leaf, (*_KINDS, MethodType)) for leaf in tree_leaves(value))


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The tables of hooks on a module, but for those with a hook that is bound to something: to the module, say."""
    tables = {key: table for key, table in vars(module).items() if key.endswith("_hooks")}
    return {key: table for key, table in tables.items() if all(map(is_setting, table.values()))}


def renew_references(module: nn.Module, copies: Mapping[int, Any], keys: Iterable[str] | None = None) -> None:
    """Let attributes of a copy, all or some, refer to `copies`, by the ids of what they were made of."""
    for key in vars(module).keys() - OF_EVERY_MODULE if keys is None else keys:
        value = vars(module)[key]
        if any(id(leaf) in copies for leaf in tree_leaves(value)):
            vars(module)[key] = tree_map(lambda leaf: copies.get(id(leaf), leaf), value)


def drop_others(module: nn.Module, copies: Iterable[Any], keys: Iterable[str]) -> list[str]:
    """Take from a copy the attributes, of some, that refer to what none of `copies` is. Returns the rest."""
    ids = set(map(id, copies))
    for key in keys:
        if any(isinstance(leaf, _KINDS) and id(leaf) not in ids for leaf in tree_leaves(vars(module)[key])):
            del vars(module)[key]
    return [key for key in keys if key in vars(module)]
