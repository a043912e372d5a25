"""Values that may cross stages: pytrees of tensors and plain values, drawn by hypothesis."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st


class Pair(NamedTuple):
    first: Any
    second: Any


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=3)
)


def containers(leaves):
    """Nested dicts, lists, tuples and namedtuples, empty ones too."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(OrderedDict),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=6,
    )


def tensors(rows):
    """Tensors of some rows; each holds other numbers."""
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool])
    shapes = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(
        lambda dtype, shape, seed: torch.randint(
            100, (rows, *shape), generator=torch.Generator().manual_seed(seed)
        ).to(dtype),
        dtypes, shapes, st.integers(0, 9),
    )


def same(one, other):
    """Equal in structure, types and every bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def leaves_of(value):
    """The leaves from left to right."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves_of(each)]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves_of(each)]
    return [value]
