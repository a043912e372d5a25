import dataclasses

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_strategies import PLAIN, Pair, containers, leaves_of, same, tensors

from pipeline.data.pytrees import Tree, add_grads, detached, flatten, same_structure, versions

values = containers(st.one_of(PLAIN, tensors(2)))


@given(values)
def test_a_value_taken_apart_and_built_again_is_the_value(value):
    tree = flatten(value, "it")
    assert same(tree.build(tree.tensors), value)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tree.tensors)


@given(values)
def test_the_tensors_are_the_values_own_each_once_from_left_to_right(value):
    found = [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]
    distinct = list({id(tensor): tensor for tensor in found}.values())
    assert [id(tensor) for tensor in flatten(value, "it").tensors] == [id(tensor) for tensor in distinct]


@given(values)
def test_building_with_other_tensors_puts_them_in_the_places(value):
    tree = flatten(value, "it")
    others = [tensor.clone() for tensor in tree.tensors]
    built = [leaf for leaf in leaves_of(tree.build(others)) if isinstance(leaf, torch.Tensor)]
    assert set(map(id, built)) == set(map(id, others))


def test_a_tensor_that_stands_twice_is_one_tensor():
    one, other = torch.ones(2), torch.ones(2)
    tree = flatten({"a": one, "b": [other, one], "c": (one,)}, "it")
    assert len(tree.tensors) == 2
    built = tree.build([torch.zeros(2), other])
    assert built["a"] is built["b"][1] is built["c"][0]


def test_a_bare_tensor_has_no_skeleton():
    tensor = torch.ones(2)
    assert flatten(tensor, "it") == Tree((tensor,), None)
    assert flatten(tensor, "it").build([tensor]) is tensor


@given(values, values)
def test_structures_are_the_same_where_only_tensors_differ(one, other):
    first, second = flatten(one, "one"), flatten(other, "other")
    again = flatten(first.build([tensor + 1 for tensor in first.tensors]), "again")
    assert same_structure(first, again)
    assert same_structure(first, second) == same_structure(second, first)

    def blank(tree):  # the same tensor for all: then equality is that of the structure
        return tree.build([torch.zeros(1)] * len(tree.tensors))

    if len(first.tensors) == len(second.tensors) <= 1:
        assert same_structure(first, second) == same(blank(first), blank(second))


@pytest.mark.parametrize(
    "one, other",
    [((1,), (1.0,)), ((1,), (True,)), ((0,), (None,)), ((1,), [1]), ({"a": 1}, {"b": 1}), (Pair(1, 2), (1, 2))],
)
def test_plain_values_and_containers_of_another_type_are_another_structure(one, other):
    assert not same_structure(flatten(one, "one"), flatten(other, "other"))


def test_nan_is_the_same_plain_value_as_nan():
    assert same_structure(flatten((float("nan"),), "one"), flatten((float("nan"),), "other"))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Foreign:
    def __str__(self):
        return "a foreign thing"


@pytest.mark.parametrize(
    "leaf, words",
    [
        (Foreign(), r"the output of stage 1 holds a test_pytrees.Foreign \(a foreign thing\)"),
        (Foreign(), "register it as a pytree node"),
        (Batch(torch.ones(1)), r"Batch .*: register it, torch.utils._pytree.register_dataclass\(Batch\)"),
        (numpy.ones(2), "holds a numpy.ndarray .* make it a tensor with torch.from_numpy"),
        (numpy.float64(2), "holds a numpy.float64 "),  # a subclass of float is no float
        ({1, 2}, "holds a builtins.set"),
        (1j, "holds a builtins.complex"),
        (torch.float32, "holds a torch.dtype"),
        (b"xy", "holds a builtins.bytes"),
    ],
)
def test_what_cannot_cross_stages_is_refused_by_name(leaf, words):
    for value in (leaf, [leaf], {"a": (torch.ones(1), leaf)}):
        with pytest.raises(TypeError, match=words):
            flatten(value, "the output of stage 1")


def test_a_refusal_cuts_long_values_short():
    with pytest.raises(TypeError) as error:
        flatten([b"x" * 10_000], "it")
    assert len(str(error.value)) < 400


def test_versions_count_writes_and_inference_tensors_do_not():
    tensor = torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
    before = versions([tensor, inference])
    tensor.add_(1)
    assert versions([tensor, inference]) == (before[0] + 1, before[1])


def test_detached_shares_memory_and_has_no_graph():
    tensor = torch.ones(2, requires_grad=True) * 2
    (found,) = detached([tensor])
    assert not found.requires_grad and found.data_ptr() == tensor.data_ptr()


def test_adding_gradients_none_is_none_and_nothing_is_written():
    one, other = torch.ones(2), torch.full((2,), 2.0)
    assert add_grads(None, None) is None
    assert add_grads(one, None) is one and add_grads(None, other) is other
    assert torch.equal(add_grads(one, other), torch.full((2,), 3.0))
    assert torch.equal(one, torch.ones(2))
