from collections import namedtuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.testing._internal.two_tensor import TwoTensor
from tree_strategies import PLAIN, Pair, containers, leaves_of, same, tensors

from pipeline import NoChunk, Pipe
from pipeline.data.microbatch import gather, scatter, scatter_like
from pipeline.data.pytrees import flatten

sizes = st.tuples(st.integers(1, 9), st.integers(1, 10))  # rows, chunks


@st.composite
def batches(draw, marks=False):
    """(value, rows, chunks); with `marks` some leaves are NoChunk."""
    rows, chunks = draw(sizes)
    leaves = st.one_of(PLAIN, tensors(rows))
    if marks:
        leaves = st.one_of(leaves, tensors(draw(st.integers(1, 3))).map(NoChunk), st.just(NoChunk((None, 2))))
    value = draw(containers(leaves))
    assume(any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(value)))
    return value, rows, chunks


class Alike(namedtuple("Alike", "one other")):
    """A container that looks at the tensors it is given."""

    def __new__(cls, one, other):
        assert one.dtype == other.dtype
        return super().__new__(cls, one, other)


def packed(rows):
    """Sequences by time steps: as many rows as steps of all sequences."""
    return pack_sequence([torch.arange(4.0)] * rows)


def cut(value, chunk, chunks, rows):
    """What chunk `chunk` is, written once more: by tensor_split, leaf by leaf."""
    if isinstance(value, NoChunk):
        return value.value
    if isinstance(value, torch.Tensor):
        return torch.tensor_split(value, min(chunks, rows))[chunk]
    if isinstance(value, dict):
        return type(value)((key, cut(each, chunk, chunks, rows)) for key, each in value.items())
    if isinstance(value, Pair):
        return Pair(*(cut(each, chunk, chunks, rows) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cut(each, chunk, chunks, rows) for each in value)
    return value


# ------------------------------------------------------------------------------------------------------------- scatter


@given(batches(marks=True))
def test_a_chunk_is_its_rows_of_every_tensor_and_all_of_the_rest(case):
    value, rows, chunks = case
    batch = scatter(value, chunks)
    assert batch.chunks == min(chunks, rows) and sum(batch.rows) == rows
    for chunk in range(batch.chunks):
        assert same(batch.value(chunk), cut(value, chunk, chunks, rows))
        message = batch.message(chunk, grad=True)
        assert same(message.tree.build(message.tree.tensors), cut(value, chunk, chunks, rows))


@given(sizes)
def test_chunks_are_as_even_as_tensor_split_makes_them(case):
    rows, chunks = case
    batch = scatter(torch.arange(rows), chunks)
    assert batch.rows == tuple(len(piece) for piece in torch.tensor_split(torch.arange(rows), min(chunks, rows)))
    assert max(batch.rows) - min(batch.rows) <= 1


@given(batches())
def test_gather_joins_what_scatter_cut(case):
    value, rows, chunks = case
    batch = scatter(value, chunks)
    trees = [batch.message(chunk, grad=False).tree for chunk in range(batch.chunks)]
    joined, sizes = gather(trees, batch.rows)
    assert same(joined.build(joined.tensors), value)
    assert sizes == (batch.rows,) * len(joined.tensors)


def test_the_same_tensor_twice_is_one_tensor_in_every_chunk():
    x = torch.randn(5, 2)
    batch = scatter({"a": x, "b": [x]}, 2)
    assert len(batch.tree.tensors) == 1 and batch.cut == (True,)
    for chunk in range(2):
        value = batch.value(chunk)
        assert value["a"] is value["b"][0]


def test_the_same_tensor_twice_in_nochunk_is_one_tensor():
    x, scale = torch.randn(5, 2), torch.randn(3)
    batch = scatter((x, NoChunk(scale), NoChunk({"again": scale})), 2)
    assert len(batch.tree.tensors) == 2 and batch.cut == (True, False)
    value = batch.value(1)
    assert value[1] is value[2]["again"]


def test_a_message_says_which_tensors_want_a_gradient_and_has_no_graph():
    x = torch.randn(4, 2, requires_grad=True)
    batch = scatter((x * 1, torch.arange(4), NoChunk(x)), 2)
    message = batch.message(0, grad=True)
    assert message.needs_grad == (True, False, True)
    assert not any(tensor.requires_grad for tensor in message.tree.tensors)
    assert batch.message(0, grad=False).needs_grad == (False, False, False)
    assert batch.value(0)[0].requires_grad  # the value itself stays attached


@pytest.mark.parametrize(
    "value, error, words",
    [
        (torch.ones(()), ValueError, r"the input holds a 0-d tensor.* Wrap it: NoChunk\(tensor\)"),
        ((torch.ones(2), torch.ones(())), ValueError, "holds a 0-d tensor"),
        (torch.ones(0, 3), ValueError, r"the input has 0 rows: Tensor\[0, 3\]"),
        ((torch.ones(2), {"a": torch.ones(3, 1)}), ValueError, r"different length: .*Tensor\[3, 1\].*rows: \[2, 3\]"),
        ((1, None, "a"), ValueError, "the input has nothing to cut: no tensor outside"),
        (NoChunk(torch.ones(2)), ValueError, r"nothing to cut: no tensor outside NoChunk\(...\) in Tensor\[2\]"),
        ((), ValueError, "nothing to cut"),
        (None, ValueError, "nothing to cut"),
        ((torch.ones(2), object()), TypeError, "the input holds a builtins.object"),
        ((torch.ones(2), NoChunk(object())), TypeError, "the input holds a builtins.object"),
        ((torch.ones(2), NoChunk(NoChunk(2))), TypeError, "holds a partition.rows.NoChunk"),
        (packed(1), TypeError, "the input holds a PackedSequence, .* Give the padded tensor and its lengths"),
        ((torch.ones(2), [packed(2)]), TypeError, "the input holds a PackedSequence"),
        (Alike(torch.ones(2), torch.ones(3)), ValueError, r"a container of \[Tensor\[2\], Tensor\[3\]\] \(rows"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_words(value, error, words):
    with pytest.raises(error, match=words):
        scatter(value, 2)


def test_what_is_packed_by_time_steps_goes_whole_to_every_chunk():
    value = packed(3)
    batch = scatter((torch.ones(4), NoChunk(value)), 2)
    assert all(same(batch.value(chunk)[1], value) for chunk in range(2))


def test_a_tensor_both_bare_and_marked_is_refused():
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"shape \[4, 3\] stands in the input both bare and in NoChunk"):
        scatter((x, NoChunk([x])), 2)


# -------------------------------------------------------------------------------------------------------- scatter_like


@given(batches(marks=True), st.data())
def test_a_target_is_cut_where_the_input_is(case, data):
    value, rows, chunks = case
    batch = scatter(torch.ones(rows), chunks)
    found = scatter_like(value, batch, "the target")
    assert found.rows == batch.rows
    for chunk in range(batch.chunks):
        assert same(found.value(chunk), cut(value, chunk, chunks, rows))


@pytest.mark.parametrize("value", [None, 3, {"a": (1, None)}, [], NoChunk(2)])
def test_a_target_without_tensors_goes_whole_to_every_chunk(value):
    found = scatter_like(value, scatter(torch.ones(5), 3), "the target")
    for chunk in range(3):
        assert found.value(chunk) == (value.value if isinstance(value, NoChunk) else value)


def test_a_target_of_whole_tensors_needs_no_rows():
    whole = torch.ones(2, 2)
    found = scatter_like({"w": NoChunk(whole)}, scatter(torch.ones(5), 3), "the target")
    assert all(found.value(chunk)["w"] is whole for chunk in range(3))


@pytest.mark.parametrize(
    "value, words",
    [
        (torch.ones(4), "the target has 4 rows but the input has 5. Give one row of the target for each row"),
        (torch.ones(()), "the target holds a 0-d tensor"),
        ((torch.ones(5), torch.ones(4)), "holds tensors of different length.*Transpose those with rows in another dim"),
        ([(torch.ones(5), torch.ones(5)), (torch.ones(4), torch.ones(4))], r"mini-batches .* is given as iter\(list\)"),
        ([torch.ones(rows) for rows in (2, 1, 3, 2, 2)], "with an entry for each row pad the entries and stack them"),
        (torch.ones(0), "the target has 0 rows"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(value, words):
    with pytest.raises(ValueError, match=words):
        scatter_like(value, scatter(torch.ones(5), 3), "the target")


# -------------------------------------------------------------------------------------------------------------- gather


def gathered(outputs, rows):
    joined, sizes = gather([flatten(output, "it") for output in outputs], rows)
    return joined.build(joined.tensors), sizes


@pytest.mark.parametrize("factor", [1, 3])
def test_outputs_may_have_several_rows_for_each_row(factor):
    outputs = [torch.ones(factor * rows, 2) * rows for rows in (3, 2, 2)]
    joined, sizes = gathered(outputs, (3, 2, 2))
    assert torch.equal(joined, torch.cat(outputs)) and sizes == ((3 * factor, 2 * factor, 2 * factor),)


def test_one_chunk_may_give_anything():
    output = {"a": torch.ones(()), "b": torch.ones(7), "c": 3}
    joined, sizes = gathered([output], (4,))
    assert same(joined, output) and sizes == ((1,), (7,))


CANNOT = {
    "0-d": ([torch.ones(()), torch.ones(())], "without dimensions cannot be joined along dim 0"),
    "same size for uneven chunks": ([torch.ones(1, 2), torch.ones(1, 2)], r"of \[3, 2\] rows gave shapes \[\[1, 2\]"),
    "sizes do not follow": ([torch.ones(3), torch.ones(3)], "do not grow with the rows"),
    "plain values differ": ([(torch.ones(3), 1), (torch.ones(2), 2)], r"gave \(Tensor\[3\], 1\) and chunk 1 gave"),
    "types differ": ([(torch.ones(3), 1), (torch.ones(2), 1.0)], "Return the same structure and the same plain"),
    "structures differ": ([[torch.ones(3)], (torch.ones(2),)], "cannot be joined: chunk 0 gave .*output=lambda o"),
    "bare and not": ([torch.ones(3), [torch.ones(2)]], "cannot be joined: chunk 0 gave"),
    "None and tensor": ([(torch.ones(3), None), (torch.ones(2), torch.ones(2))], "cannot be joined: chunk 0 gave"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_outputs_that_cannot_be_joined_are_refused_with_words(name):
    outputs, words = CANNOT[name]
    with pytest.raises(ValueError, match=words):
        gathered(outputs, (3, 2))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_tensors_that_wrap_others_cross_stages_beside_others(checkpoint):
    class Wrap(nn.Linear):
        def forward(self, x):
            return TwoTensor(x.detach() * 5, x.detach() * 2), super().forward(x)

    class Unwrap(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[1]) * (pair[0] * 3).b

    model = nn.Sequential(Wrap(4, 4), nn.Identity(), Unwrap(4, 4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    pipe = Pipe(model, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    found = torch.autograd.grad(pipe(x).square().sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_a_tensor_twice_in_one_chunk_and_two_tensors_in_another_are_joined_or_refused():
    # [x, x] in one chunk and [x, y] in another: which tensor joins which must not depend on their number alone.
    x, y, z = torch.zeros(3), torch.ones(2), torch.full((2,), 2.0)
    with pytest.raises(ValueError, match="cannot be joined"):
        gathered([[x, x], [y, z]], (3, 2))


# ---------------------------------------------------------------------------------------------------------- join_grads


def test_gradients_of_cut_tensors_are_joined_and_of_whole_ones_summed_ascending():
    x, scale = torch.randn(7, 2), torch.randn(100)
    batch = scatter((x, NoChunk(scale)), 4)
    parts = [torch.randn(100) * 10.0**chunk for chunk in range(4)]
    pieces = [torch.randn(rows, 2) for rows in batch.rows]
    joined, total = batch.join_grads(list(zip(pieces, parts, strict=True)))
    assert torch.equal(joined, torch.cat(pieces))
    assert torch.equal(total, ((parts[0] + parts[1]) + parts[2]) + parts[3])


@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_chunks_without_a_gradient_are_zero_rows_or_no_contribution(present):
    x, scale = torch.randn(7, 2), torch.randn(3)
    batch = scatter((x, NoChunk(scale)), 4)
    grads = [(torch.ones(rows, 2), torch.ones(3)) if there else (None, None)
             for rows, there in zip(batch.rows, present, strict=True)]
    joined, total = batch.join_grads(grads)
    if not any(present):
        assert joined is None and total is None
    else:
        rows = [float(there) for rows, there in zip(batch.rows, present, strict=True) for _ in range(rows)]
        assert joined[:, 0].tolist() == rows == joined[:, 1].tolist()
        assert torch.equal(total, torch.full((3,), float(sum(present))))


def test_summing_whole_gradients_writes_none_of_them():
    batch = scatter((torch.ones(2), NoChunk(torch.ones(3))), 2)
    parts = [torch.ones(3), torch.ones(3)]
    batch.join_grads([(None, part) for part in parts])
    assert all(torch.equal(part, torch.ones(3)) for part in parts)
