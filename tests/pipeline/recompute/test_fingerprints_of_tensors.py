"""Some entries of a tensor: which, are they its values, and when do two compare as equal?"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.recompute.fingerprints import COUNT, addresses, entries, positions, same_entries, sample

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def lying(kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape that lies in memory in some way, with values drawn from torch's generator."""
    def drawn(shape: list[int]) -> Tensor:
        whole = torch.randint(-99, 99, shape) if dtype.is_signed else torch.randint(0, 2, shape)
        return whole.to(dtype)

    if kind == "transposed":
        return drawn(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    if kind == "sliced":
        return drawn([1 + 2 * length for length in shape])[tuple([slice(1, None, 2)] * len(shape))]
    if kind == "expanded":
        return drawn([*shape[:-1], 1]).expand(shape) if shape else drawn(shape)
    return drawn(shape)


@given(
    kind=st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
    shape=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_tensor_differs_where_an_entry_that_is_taken_does(
    kind: str, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensor = lying(kind, shape, dtype)
    assert list(tensor.shape) == shape
    then = entries([tensor])
    assert same_entries(then, entries([tensor.clone()])), "however it lies"
    if kind == "expanded" or not tensor.numel():
        return
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    at = data.draw(st.integers(0, flat.numel() - 1))
    flat[at] = not flat[at] if dtype is torch.bool else flat[at] + 1
    if kind == "contiguous":
        tensor = flat.view(shape)
    else:
        tensor.copy_(flat.view(shape))  # where it lies
    assert same_entries(then, entries([tensor])) == (at not in positions(flat.numel()))


@given(st.integers(0, 10**7))
def test_the_entries_are_spread_over_the_tensor(size: int) -> None:
    taken = positions(size)
    assert taken == sorted(set(taken)) and len(taken) <= COUNT
    if size <= COUNT:
        assert taken == list(range(size))
        return
    assert 0 <= taken[0] and taken[-1] < size and len(taken) > COUNT * 3 / 4
    gaps = [after - before for before, after in zip(taken, [*taken[1:], size], strict=True)]
    assert max(gaps) <= math.ceil(3 * size / COUNT)


@pytest.mark.parametrize("width", [2**power for power in range(4, 13)])
def test_the_entries_are_spread_over_the_features(width: int) -> None:
    """A layer may err in some features only; as many rows as entries must not mean one feature for all."""
    for rows in (1, 2, 8, 32, 64, 1024):
        features = {position % width for position in positions(rows * width)}
        assert len(features) >= min(COUNT, width) / 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_equals_nan_and_zero_minus_zero(dtype: torch.dtype) -> None:
    one = torch.tensor([math.nan, 0.0, math.inf, 1.0], dtype=dtype)
    same = torch.tensor([-math.nan, -0.0, math.inf, 1.0], dtype=dtype)
    assert same_entries(entries([one]), entries([same]))
    for other in ([0.0, 0.0, math.inf, 1.0], [math.nan, 0.0, -math.inf, 1.0], [math.nan, math.nan, math.inf, 1.0]):
        assert not same_entries(entries([one]), entries([torch.tensor(other, dtype=dtype)]))


def test_another_dtype_or_number_of_entries_is_another_output() -> None:
    zeros = torch.zeros(4)
    assert not same_entries(entries([zeros]), entries([zeros.double()]))
    assert not same_entries(entries([zeros]), entries([zeros.int()]))
    assert not same_entries(entries([zeros]), entries([zeros[:3]]))
    assert not same_entries(entries([zeros]), entries([zeros, zeros]))
    assert not same_entries(entries([zeros]), entries([zeros.cfloat()]))


def test_a_layout_without_strides_and_a_subclass_are_taken_too() -> None:
    class Own(Tensor):
        pass

    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for made in (dense.to_sparse(), dense.as_subclass(Own), torch.nn.Parameter(dense)):
        assert same_entries(entries([made]), entries([dense])), type(made)
        assert not same_entries(entries([made]), entries([dense + 1])), type(made)


def test_a_tensor_with_a_graph_gets_no_longer_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    (taken,) = entries([weight])
    assert isinstance(taken, Tensor) and not taken.requires_grad
    assert same_entries([taken], entries([weight * 1]))


def test_a_tensor_without_memory_of_its_own_is_left_alone() -> None:
    assert entries([torch.empty(3, device="meta")]) == []
    assert same_entries(entries([torch._efficientzerotensor(3)]), entries([torch.zeros(3)]))


@given(
    kind=st.sampled_from(["contiguous", "transposed", "sliced"]),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_sample_differs_where_all_values_do_and_not_where_none_does(
    kind: str, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensor = lying(kind, shape, dtype)
    then = sample(tensor, frozenset())
    assert then == sample(tensor, frozenset())
    tensor.copy_(~tensor if dtype is torch.bool else tensor + 1)
    assert then != sample(tensor, frozenset()) and then[:2] == (dtype, tensor.shape)


@pytest.mark.parametrize("shape", [(64, 64), (32, 48), (1000, 3), (7, 5, 96), (16, 4, 8, 8)])
def test_a_sample_differs_where_a_row_of_any_length_or_a_quarter_of_the_features_does(shape: tuple[int, ...]) -> None:
    """Of as many rows as bytes are taken each is seen, and of any more as many."""
    tensor = torch.zeros(shape)
    then = sample(tensor, frozenset())
    for quarter in range(4 if shape[-1] > 3 else 0):
        features = torch.zeros(shape)
        features[..., quarter * shape[-1] // 4 : (quarter + 1) * shape[-1] // 4] = math.pi
        assert then != sample(features, frozenset())
    rows = math.prod(shape[:-1])
    seen = 0
    for row in range(rows):
        changed = torch.zeros(shape)
        changed.view(rows, -1)[row] = math.pi
        seen += then != sample(changed, frozenset())
    assert seen >= min(rows, COUNT)


def test_a_sample_of_known_memory_is_its_address_and_of_what_memory_does_not_show_it_equals_no_other() -> None:
    weight, sparse = torch.nn.Parameter(torch.ones(3, 4)), torch.eye(3).to_sparse()
    known = addresses([weight, sparse])
    assert known == {weight.data_ptr()}
    assert sample(weight.t(), known) == sample(weight.t(), known) == (torch.float32, (4, 3), weight.data_ptr())
    assert sample(weight.t().contiguous(), known) != sample(weight.t(), known)
    assert sample(sparse, known) != sample(sparse, known)
    assert sample(torch.ones(0, 3), known) == sample(torch.ones(0, 3), known)
    assert sample(torch.empty(3, device="meta"), known) == sample(torch.empty(3, device="meta"), known)
