"""Agreement: equal words agree, unequal ones are told apart, by rank, and only by what differs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.distributed.agreement import difference, digest, values_in_words
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.data_parallel.communicator import DataParallelCommunicator
from pipeline.distributed.exchange import RankExchange
from pipeline.distributed.mailbox import RankMailbox
from pipeline.distributed.tied import TiedGradients
from pipeline.distributed.topology import PipeTopology
from pipeline.execution.communicator import Communicator, Exchange, Gradients, Topology
from pipeline.execution.mailbox import Mailbox


@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        (DistributedCommunicator, Communicator), (DataParallelCommunicator, Communicator), (RankExchange, Exchange),
        (TiedGradients, Gradients), (PipeTopology, Topology), (RankMailbox, Mailbox),
    ],
)
def test_with_other_processes_nothing_is_answered_as_in_a_process_that_is_alone(kind: type, alone: type) -> None:
    kept = {"__len__"}  # of what is under way here, over ranks too
    kept |= {"any", "put", "take", "put_grads", "take_grads"}  # which ask `rows`, and go row by row
    assert {name for name, value in vars(alone).items() if callable(value)} <= {*vars(kind), *kept}
    assert vars(kind).get("is_alone", False) is False and (kind.__base__ is alone)


@given(st.text(), st.text())
def test_digests_are_equal_for_equal_texts_only(one: str, other: str) -> None:
    assert (digest(one) == digest(other)) == (one == other)
    assert 0 <= digest(one) < 2**63


def test_a_digest_is_the_same_in_every_process() -> None:
    assert digest("balance [1, 2]") == 6401574045171436422


def test_what_differs_first_is_told_with_its_ranks() -> None:
    by_rank = [{"a": "1", "b": value} for value in ("x", "y", "x", "z")]
    assert difference(by_rank) == "b differ between the ranks: ranks 0, 2: x; rank 1: y; rank 3: z"
    by_rank[1] = {"a": "2", "b": "y"}
    assert difference(by_rank).startswith("a differ between the ranks: ranks 0, 2, 3: 1; rank 1: 2")


@pytest.mark.parametrize("short", [0, 1])
def test_the_rank_that_says_less_says_why(short: int) -> None:
    """It has no more mini-batches, and so no settings of a call with one."""
    by_rank = [{"the calls": "1", "the settings": "chunks 3", "the mini-batches": "x [6, 4]"}] * 2
    by_rank[short] = {"the calls": "1", "the mini-batches": "none after 2"}
    said = ["x [6, 4]", "none after 2"] if short else ["none after 2", "x [6, 4]"]
    assert difference(by_rank) == "the mini-batches differ between the ranks: rank 0: {}; rank 1: {}".format(*said)
    by_rank[short] = {"the calls": "1"}
    assert difference(by_rank).startswith("the settings differ between the ranks: rank ")


def test_of_long_settings_only_the_lines_that_differ_are_told() -> None:
    lines = [f"{index}.weight: [4, 4] float32" for index in range(100)]
    other = [*lines[:42], "42.weight: [4, 5] float32", *lines[43:]]
    words = difference([{"the settings": "\n".join(each)} for each in (lines, other)])
    assert words == (
        "the settings differ between the ranks: rank 0: 42.weight: [4, 4] float32; rank 1: 42.weight: [4, 5] float32"
    )


VALUES = {
    "rows": torch.arange(12.0).reshape(4, 3),
    "half": torch.arange(6.0, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "bool": torch.tensor([True, False]),
    "number": torch.tensor(3.0),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_equal_have_the_same_digest_however_they_lie_in_memory(name: str) -> None:
    value = VALUES[name]
    expected = values_in_words([value])
    assert values_in_words([value.clone()]) == expected
    if value.dim() == 2 and value.layout is torch.strided:
        assert values_in_words([value.t().contiguous().t()]) == expected


@given(st.integers(0, 11), st.integers(0, 11))
def test_values_that_differ_in_a_number_or_in_the_order_of_rows_have_another_digest(one: int, other: int) -> None:
    rows = VALUES["rows"].reshape(-1)
    swapped = rows.clone()
    swapped[one], swapped[other] = rows[other], rows[one]
    assert (values_in_words([swapped]) == values_in_words([rows])) == (one == other)
    changed = rows.clone()
    changed[one] = torch.nextafter(changed[one], torch.tensor(100.0))
    assert values_in_words([changed]) != values_in_words([rows])
    assert len({values_in_words([value]) for value in VALUES.values()}) == len(VALUES)
    assert values_in_words([rows, changed]) != values_in_words([changed, rows])
