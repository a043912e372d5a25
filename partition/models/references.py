"""Attributes that refer to modules and parameters, beside the tables that hold them: a list of blocks, a dict of heads.

    the model     self.blocks = [block 0, block 1]       and add_module("0", block 0), ...
    by_name       [NameReference("0"), ...]
    in a run      [stand-in 0, stand-in 1]               what stands there under these names
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from partition.names import OF_EVERY_MODULE

_KINDS = (nn.Module, nn.Parameter)


class NameReference(NamedTuple):
    """A module or a parameter, by its name in the model."""

    name: str

    def resolve(self, root: nn.Module) -> Any:
        """The one that has this name now."""
        parent, _, key = self.name.rpartition(".")
        return getattr(root.get_submodule(parent), key) if key else root


def references_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that refer to modules or parameters, in lists, tuples and dicts."""
    attributes = vars(module).items()
    return {
        key: value for key, value in attributes
        if key not in OF_EVERY_MODULE and any(isinstance(leaf, _KINDS) for leaf in tree_leaves(value))
    }  # fmt: skip


def by_name(references: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """References with names in the places of modules and parameters. Those to what has none are left out.

    Args:
        references: by attribute.
        names: by the id of a module, or of a parameter.
    """
    resolvable = {
        key: value for key, value in references.items()
        if all(id(leaf) in names for leaf in tree_leaves(value) if isinstance(leaf, _KINDS))
    }  # fmt: skip
    return {
        key: tree_map_only(_KINDS, lambda leaf: NameReference(names[id(leaf)]), value)
        for key, value in resolvable.items()
    }


def put_in(module: nn.Module, references: Mapping[str, Any], root: nn.Module) -> None:
    """Let the attributes of a module refer to what has these names in a root."""
    for key, value in references.items():
        vars(module)[key] = tree_map_only(
            NameReference, lambda reference: reference.resolve(root), value,
            is_leaf=lambda leaf: isinstance(leaf, NameReference),
        )  # fmt: skip


def renewed_references(module: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let the attributes of a copy refer to `copies`, by the ids of what they were made of."""
    for key, value in references_of(module).items():
        vars(module)[key] = tree_map_only(_KINDS, lambda leaf: copies.get(id(leaf), leaf), value)
