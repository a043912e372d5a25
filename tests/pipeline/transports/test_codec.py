import copy
import dataclasses
import enum
import json
import math
import struct
import subprocess  # noqa: F401  # so that a name could be found in it
import sys
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from tree_strategies import Pair

from pipeline.data.pytrees import flatten
from pipeline.transports.codec import decode, encode, may_be_shared, same_skeleton


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Labelled:
    """A node whose context is whatever it is made with."""

    inner: Any
    label: Any


class Level(enum.Enum):
    LOW = 1


@dataclasses.dataclass
class Levelled:
    """A node that says itself how its context is written."""

    inner: Any
    level: Level


pytree.register_dataclass(Point)
pytree.register_pytree_node(
    Labelled, lambda node: ([node.inner], node.label), lambda inner, label: Labelled(*inner, label)
)
pytree.register_pytree_node(
    Levelled, lambda node: ([node.inner], node.level), lambda inner, level: Levelled(*inner, level),
    serialized_type_name="test_codec.Levelled",
    to_dumpable_context=lambda level: level.name, from_dumpable_context=Level.__getitem__,
)

TENSOR = torch.zeros(1)
FLOATS = [0.0, -0.0, 1.0, 0.1, math.inf, -math.inf, math.nan, 5e-324]
plain_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([2**62, -(2**63), 2**63, -(2**64)]),
    st.sampled_from(FLOATS), st.floats(allow_nan=False), st.text(max_size=3), st.sampled_from(["\ud800", "*", "\n"]),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.5, math.inf, "a", "b", (1, "c")]))
contexts = st.recursive(
    st.one_of(plain_leaves, st.sampled_from([int, Point, Labelled, torch.float32, torch.strided, torch.device("cpu")])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=5,
)


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda each: deque(each, maxlen=4)),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=2).map(lambda each: defaultdict(list, each)),
        st.builds(Pair, inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Labelled, inner, contexts),
        st.builds(Levelled, inner, st.just(Level.LOW)),
        st.lists(inner, min_size=2, max_size=2).map(torch.return_types.max),
    )


values = st.recursive(st.one_of(plain_leaves, st.just(TENSOR)), containers, max_leaves=6)


def over(skeleton):
    """Write and read, as the two ends of a link do."""
    return decode(json.loads(json.dumps(encode(skeleton))))


def rebuilt(skeleton):
    return pytree.tree_unflatten(list(skeleton.leaves), skeleton.spec)


def exactly(value):
    """What tells values of other types, signs and orders apart."""
    return repr(value)


@given(values)
def test_what_is_read_builds_the_value_that_was_written(value):
    skeleton = flatten([value], "it").skeleton
    found = over(skeleton)
    assert exactly(rebuilt(found)) == exactly(rebuilt(skeleton))
    assert found.spec == skeleton.spec or "nan" in exactly(value)
    assert same_skeleton(found, skeleton) and same_skeleton(skeleton, found)


@given(values, values)
def test_skeletons_are_the_same_where_values_are_the_same_exactly(one, other):
    first, second = flatten([one], "one").skeleton, flatten([other], "other").skeleton
    assert same_skeleton(first, second) == (exactly(rebuilt(first)) == exactly(rebuilt(second)))


@given(values)
def test_a_value_of_its_own_that_is_equal_has_the_same_skeleton(value):
    assert same_skeleton(flatten([value], "it").skeleton, flatten([copy.deepcopy(value)], "it").skeleton)


def test_what_python_calls_equal_is_told_apart():
    alike = [
        [1, True, 1.0], [0, False, 0.0, -0.0], [{1: TENSOR}, {True: TENSOR}, {1.0: TENSOR}],
        [{0.0: TENSOR}, {-0.0: TENSOR}], [(TENSOR,), [TENSOR]], [{"a": TENSOR}, OrderedDict(a=TENSOR)],
        [{"a": 1, "b": 1}, {"b": 1, "a": 1}], [Labelled(1, 1), Labelled(1, True), Labelled(1, (1,)), Labelled(1, [1])],
        [defaultdict(list, a=1), defaultdict(int, a=1)], [deque([1]), deque([1], maxlen=2)],
        [Pair(1, 2), (1, 2), Point(1, 2)], [Labelled(1, 0.0), Labelled(1, -0.0)], [None, "None"],
        [Labelled(1, {"a": 1, "b": 2}), Labelled(1, {"b": 2, "a": 1})],
    ]
    for group in alike:
        skeletons = [flatten([value], "it").skeleton for value in group]
        for place, one in enumerate(skeletons):
            assert [same_skeleton(one, other) for other in skeletons] == [place == i for i in range(len(group))]


def test_every_bit_of_a_nan_is_kept():
    (odd,) = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))
    first, second = flatten([odd], "it").skeleton, flatten([math.nan], "it").skeleton
    assert struct.pack("<d", over(first).leaves[0]).hex() == "010000000000f8ff"
    assert not same_skeleton(first, second)


def test_no_skeleton_is_written_as_none():
    assert over(None) is None and same_skeleton(None, None)
    assert not same_skeleton(None, flatten([], "it").skeleton) and not same_skeleton(flatten([], "it").skeleton, None)


@given(contexts)
def test_plain_values_are_read_as_they_were_written(value):
    assert exactly(decode(json.loads(json.dumps(encode(value))))) == exactly(value)


def test_a_context_that_is_read_twice_is_two_values():
    written = encode(flatten(Labelled(1, {"a": [1]}), "it").skeleton)
    assert decode(written).spec.context is not decode(written).spec.context


@given(values)
def test_a_spec_may_be_shared_unless_a_class_gets_a_context_that_can_be_written_in(value):
    def is_safe(node):
        if isinstance(node, (Labelled, Levelled, Point)):
            context = {Labelled: lambda: node.label, Levelled: lambda: node.level, Point: lambda: []}[type(node)]()
            if not isinstance(context, (type(None), bool, int, float, str, type)):
                return False
            return is_safe(node.inner)
        if isinstance(node, dict):
            return all(map(is_safe, node.values()))
        return all(map(is_safe, node)) if isinstance(node, (list, tuple, deque, torch.return_types.max)) else True

    assert may_be_shared(flatten([value], "it").skeleton.spec) == is_safe(value)


def refusal(value):
    with pytest.raises(TypeError) as caught:
        encode(flatten(value, "it").skeleton)
    return str(caught.value)


def test_a_context_that_cannot_be_written_is_refused_by_name():
    message = refusal([Labelled(1, Level.LOW)])
    assert message == (
        "a test_codec:Labelled, which cannot be sent to another rank: of its context for torch.utils._pytree, a "
        "test_codec:Level (Level.LOW) is not a plain value. Register it with a context of plain values, or with "
        "to_dumpable_context= and from_dumpable_context=."
    )
    assert "a builtins:function" in refusal(Labelled(1, [lambda: 1])) and "torch:Tensor" in refusal(Labelled(1, TENSOR))
    assert "a builtins:function" in refusal(defaultdict(lambda: 1, a=1))


def test_a_class_that_cannot_be_found_by_its_name_is_refused():
    class Local(NamedTuple):
        x: int

    assert "<locals>.Local cannot be found by its name; define it at the top level" in refusal(Local(1))
    assert "the class builtins:function cannot be found" in refusal(Labelled(1, type(lambda: 1)))
    Local.__qualname__ = "Point"  # which finds another class
    assert "the class test_codec:Point cannot be found by its name" in refusal(Local(1))


def test_of_two_registered_classes_of_one_name_the_first_is_refused():
    def register():
        class Twin:
            pass

        pytree.register_pytree_node(Twin, lambda node: ([], None), lambda leaves, context: Twin())
        return Twin

    first, second = register(), register()
    assert over(flatten(second(), "it").skeleton).spec.type is second
    assert not same_skeleton(flatten(first(), "it").skeleton, flatten(second(), "it").skeleton)
    assert "Twin, which cannot be sent to another rank: another class of that name" in refusal([first()])


def test_a_class_that_the_reader_does_not_know_is_named(monkeypatch):
    written, levelled = (encode(flatten(value, "it").skeleton) for value in (Point(1, 2), Levelled(1, Level.LOW)))
    named = encode(flatten(Labelled(1, Level), "it").skeleton)
    monkeypatch.delitem(pytree.SUPPORTED_NODES, Point)
    with pytest.raises(LookupError, match="holds a test_codec:Point, which is registered.*on every rank before"):
        decode(written)
    monkeypatch.delattr("test_codec.Level")
    with pytest.raises(LookupError, match="names the class test_codec:Level, which this process does not know. Import"):
        decode(named)
    definition = pytree.SUPPORTED_SERIALIZED_TYPES[Levelled]._replace(from_dumpable_context=None)
    monkeypatch.setitem(pytree.SUPPORTED_SERIALIZED_TYPES, Levelled, definition)
    with pytest.raises(LookupError, match="test_codec:Levelled is registered without from_dumpable_context="):
        decode(levelled)


def test_integers_of_any_size_are_kept():
    for number in (10**5000, -(10**5000), 2**63, 2**63 - 1, -(2**63), -(2**63) - 1):
        assert decode(json.loads(json.dumps(encode(number)))) == number


def test_reading_imports_nothing_and_takes_nothing_but_types():
    assert "this" not in sys.modules
    for name in ("this:d", "os:system", "builtins:print", "nowhere", "nowhere:at.all", "builtins:int.real"):
        with pytest.raises(LookupError, match=f"names the class {name}, which this process does not know"):
            decode({"type": name})
    assert "this" not in sys.modules


def test_a_named_tuple_is_built_by_a_class_of_tuples_only():
    written = encode(flatten(Pair(1, 2), "it").skeleton)
    written["skeleton"][0]["node"][1] = {"type": "subprocess:Popen"}
    with pytest.raises(LookupError, match="holds a subprocess:Popen as a namedtuple, which it is not on this rank"):
        decode(written)
