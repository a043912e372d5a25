"""Laws of partition.splitting."""

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import PartitionError, split
from partition.splitting import check_balance, check_module

balances = st.lists(st.integers(1, 4), min_size=1, max_size=6)


def linears(layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(balances)
def test_stages_hold_the_same_layers_under_the_same_names_in_order(balance: list[int]) -> None:
    module = linears(sum(balance))
    stages = split(module, balance)
    held = [(name, layer) for stage in stages for name, layer in stage.named_children()]
    assert [len(stage) for stage in stages] == balance
    assert [name for name, _ in held] == [name for name, _ in module.named_children()]
    assert all(layer is own for (_, layer), own in zip(held, module, strict=True))


@settings(derandomize=True, deadline=None, max_examples=examples(20))
@given(balances)
def test_stages_one_after_the_other_are_the_module(balance: list[int]) -> None:
    module = linears(sum(balance))
    x = whole = torch.rand(3, 2)
    for stage in split(module, balance):
        x = stage(x)
    assert torch.equal(x, module(whole))


def test_state_dicts_of_the_stages_make_up_the_state_dict_of_the_module() -> None:
    module = nn.Sequential(OrderedDict(body=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 1)))
    keys = [key for stage in split(module, [1, 2]) for key in stage.state_dict()]
    assert keys == list(module.state_dict())
    assert split(nn.Sequential(*[nn.ReLU() for _ in range(5)]), [3, 2])[1]._modules.keys() == {"3", "4"}


def test_a_layer_that_stands_in_two_places_keeps_both() -> None:
    layer = nn.Linear(2, 2)
    head, tail = split(nn.Sequential(layer, layer, nn.ReLU(), layer), [1, 3])
    assert list(tail._modules) == ["1", "2", "3"]
    assert head[0] is tail[0] is tail[2] is layer


@pytest.mark.parametrize("training", [True, False])
def test_stages_have_the_mode_of_the_module_and_the_layers_keep_theirs(training: bool) -> None:
    module = linears(2).train(training)
    module[1].train(not training)
    head, tail = split(module, [1, 1])
    assert head.training is tail.training is module.training is training
    assert [layer.training for layer in module] == [training, not training]


def test_a_subclass_that_only_makes_its_layers_is_split() -> None:
    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2), nn.ReLU())

    assert [type(stage) for stage in split(Model(), [1, 1])] == [nn.Sequential, nn.Sequential]


@pytest.mark.parametrize(
    "balance",
    [(1, 3), iter([1, 3]), np.array([1, 3]), torch.tensor([1, 3]), [np.int64(1), torch.tensor(3)], {1: "a", 3: "b"}],
    ids=["tuple", "iterator", "array", "tensor", "a mixture", "keys"],
)
def test_a_balance_may_be_any_iterable_of_ints(balance: Any) -> None:
    checked = check_balance(balance, 4)
    assert checked == [1, 3] and all(type(count) is int for count in checked)


def test_a_module_that_is_no_sequential_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential, the layers in order; got Linear\. Write"):
        split(nn.Linear(1, 1), [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got list"):
        check_module([nn.Linear(1, 1)])


def test_a_sequential_with_its_own_forward_is_refused() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)  # type: ignore[no-any-return]

    patched = linears(1)
    patched.forward = lambda x: x  # type: ignore[assignment]
    for module, name in ((Residual(nn.Linear(1, 1)), "Residual"), (patched, "Sequential")):
        words = rf"{name} is an nn\.Sequential with its own forward.*sample=.*pass nn\.Sequential\(\*module\)"
        with pytest.raises(PartitionError, match=words):
            split(module, [1])


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"module has no layers \(Sequential\(\)\)"):
        split(nn.Sequential(), [])


REMEDY = "or partition.balance_by_time(2, module, sample) to choose one."


@pytest.mark.parametrize(
    "balance, words",
    [
        ([2, 3], f"balance sums to 5 but the module has 4 layers (balance: [2, 3]). Use balance=[2, 2], {REMEDY}"),
        ([1, 2], f"balance sums to 3 but the module has 4 layers (balance: [1, 2]). Use balance=[2, 2], {REMEDY}"),
        ([4, 0], f"balance[1] is 0, below 1 (balance: [4, 0]). Use balance=[2, 2], {REMEDY}"),
        ([5, -1], f"balance[1] is -1, below 1 (balance: [5, -1]). Use balance=[2, 2], {REMEDY}"),
        ([2, 2.0], f"balance[1] is 2.0, not an int (balance: [2, 2.0]). Use balance=[2, 2], {REMEDY}"),
        ([3, True], f"balance[1] is True, not an int (balance: [3, True]). Use balance=[2, 2], {REMEDY}"),
        ("22", f"balance[0] is '2', not an int; balance[1] is '2', not an int (balance: ['2', '2']). Use {''}"),
        ([], "balance is empty (balance: []). Use balance=[4], or partition.balance_by_time(1, module, sample) to"),
        ([1] * 9, "balance sums to 9 but the module has 4 layers (balance: [1, 1, 1, 1, 1, 1, 1, 1, 1]). Use "),
        ([1] * 9, "Use balance=[1, 1, 1, 1], or partition.balance_by_time(4, module, sample) to choose one."),
        ([0, None, -1], "balance[1] is None, not an int; balance[0] is 0, below 1; balance[2] is -1, below 1 (balance"),
        ([0, 9], "balance[0] is 0, below 1; balance sums to 9 but the module has 4 layers (balance: [0, 9])"),
    ],
)
def test_all_faults_of_a_balance_are_named_at_once_with_what_to_do(balance: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=re.escape(words)):
        split(linears(4), balance)


def test_a_balance_that_is_no_iterable_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match=re.escape("as a list; got 4. Use balance=[1, 1, 1, 1]")):
        split(linears(4), 4)  # type: ignore[arg-type]
