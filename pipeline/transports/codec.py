"""The encoding of a value's structure as JSON, without pickle, for another process.

    Skeleton --encode--> plain values that JSON can hold --decode--> an equal Skeleton, of the same types

    spec of (x, [y])   {"node": "builtins:tuple", "context": null, "children": ["*", {...}]}

A node is written as its name, which the other process looks up among its own registered pytree nodes. What a class
hands to `torch.utils._pytree` as its context must be made of plain values (`pipeline.transports.plain`), or the class
says itself how to write it (`to_dumpable_context`).
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from pipeline.data.pytrees import Skeleton, TensorPosition
from pipeline.transports.plain import Json, decode_plain, encode_plain, qualified, write_float

_LEAF = "*"
_LEAF_SPEC = pytree.tree_structure(0)
_LISTS_KEYS = (dict, OrderedDict, defaultdict)  # their context is a list of keys, which torch alone reads


def encode(skeleton: Skeleton | None) -> Json:
    """The structure of a value, for `json.dumps`.

    Raises:
        TypeError: the structure has a part that cannot be written. It says which, and what to do.

    Example:
        >>> import torch
        >>> from pipeline.data.pytrees import flatten
        >>> encode(flatten((torch.ones(2), 7), "it").skeleton)["leaves"]
        [{'slot': 0}, 7]

    """
    if skeleton is None:
        return None
    leaves = [
        {"slot": leaf.place} if isinstance(leaf, TensorPosition) else encode_plain(leaf) for leaf in skeleton.leaves
    ]
    return {"spec": _encode_spec(skeleton.spec), "leaves": leaves}


def decode(written: Json) -> Skeleton | None:
    """The inverse of `encode`.

    Raises:
        LookupError: it names a class that this process does not know.
    """
    if written is None:
        return None
    leaves = [TensorPosition(leaf["slot"]) if _is(leaf, "slot") else decode_plain(leaf) for leaf in written["leaves"]]
    return Skeleton(_decode_spec(written["spec"]), tuple(leaves))


def same_skeleton(one: Skeleton | None, other: Skeleton | None) -> bool:
    """Whether both are written alike: of the same types, 1 is not True, -0.0 is not 0.0 and nan is nan."""
    if one is other or one is None or other is None:
        return one is other
    return _same_spec(one.spec, other.spec) and all(map(_same_leaf, one.leaves, other.leaves))


def may_be_shared(spec: pytree.TreeSpec) -> bool:
    """Whether many values may be built by one spec, since nobody can write in its contexts."""
    immutable = spec.type in _LISTS_KEYS or isinstance(spec.context, (type(None), bool, int, float, str, type))
    return immutable and all(map(may_be_shared, spec.children()))


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return write_float(one) == write_float(other) if type(one) is float else bool(one == other)


def _same_spec(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    ones, others = one.children(), other.children()
    return one is other or (
        one.type is other.type
        and len(ones) == len(others)
        and _same_context(one, other)
        and all(map(_same_spec, ones, others))
    )


def _same_context(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    """Not by == alone: 1 == True, and a class may have odd ideas of what is equal."""
    if one.context is other.context:
        return True
    if one.type in (dict, OrderedDict) and all([type(key) is str for key in one.context + other.context]):
        return bool(one.context == other.context)
    return json.dumps(_encode_context(one)) == json.dumps(_encode_context(other))


def _encode_spec(spec: pytree.TreeSpec) -> Json:
    if spec.is_leaf():
        return _LEAF
    name = qualified(spec.type)
    if _nodes().get(name) is not spec.type:
        raise TypeError(
            f"a {name}, which cannot be sent to another rank: another class of that name is registered as a pytree "
            "node. Give it a name of its own."
        )
    return {
        "node": name,
        "context": _encode_context(spec),
        "children": [_encode_spec(child) for child in spec.children()],
    }


def _decode_spec(written: Json) -> pytree.TreeSpec:
    if written == _LEAF:
        return _LEAF_SPEC
    kind = _nodes().get(written["node"])
    if kind is None:
        raise LookupError(
            f"it holds a {written['node']}, which is registered as a pytree node on the rank that sent it and not on "
            "this one. Call torch.utils._pytree.register_pytree_node on every rank before the Pipe is called."
        )
    context = _decode_context(written["context"], kind)
    return pytree.TreeSpec(kind, context, [_decode_spec(child) for child in written["children"]])


def _encode_context(spec: pytree.TreeSpec) -> Json:
    try:
        return encode_plain(spec.context)
    except TypeError as error:
        dump = _dumping(spec.type).to_dumpable_context
        if dump is None or spec.type in (namedtuple, defaultdict):  # these two write no more than is written here
            raise TypeError(
                f"a {qualified(spec.type)}, which cannot be sent to another rank: of its context for "
                f"torch.utils._pytree, {error}. Register it with a context of plain values, or with "
                "to_dumpable_context= and from_dumpable_context=."
            ) from None
        return {"dumped": encode_plain(dump(spec.context))}


def _decode_context(written: Json, kind: Any) -> Any:
    if not _is(written, "dumped"):
        context = decode_plain(written)
        if kind is namedtuple and not issubclass(context, tuple):  # torch will call it
            raise LookupError(f"it holds a {qualified(context)} as a namedtuple, which it is not on this rank.")
        return context
    load = _dumping(kind).from_dumpable_context
    if load is None:
        raise LookupError(f"{qualified(kind)} is registered without from_dumpable_context= on this rank. Give it one.")
    return load(decode_plain(written["dumped"]))


def _nodes() -> dict[str, Any]:
    """The registered pytree nodes by name; of several with one name, the last."""
    return {qualified(kind): kind for kind in pytree.SUPPORTED_NODES}


def _dumping(kind: Any) -> Any:
    return pytree.SUPPORTED_SERIALIZED_TYPES[kind]


def _is(written: Json, tag: str) -> bool:
    return isinstance(written, dict) and tag in written
