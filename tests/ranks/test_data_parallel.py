"""Law: replicas of a pipeline train with the means of their gradients, to the bit, and stay one model."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from cover import some
from crew import Crew
from one_and_many import differences

from pipeline.distributed.data_parallel.gradient_means import _mean
from pipeline.distributed.data_parallel.shards import shards_of


def check(crew: Crew, cases: list[dict[str, Any]], in_process: bool = False) -> None:
    """All ranks know what averaging by hand gives, and together everything; in some of the cases (cover.py)."""
    cases = some(cases)
    results = crew.run("replica_training:compare", cases, in_process, timeout=120.0)
    faults = []
    for case, *ranks in zip(cases, *results, strict=True):
        faults += [f"{case}, rank {rank}: {wrong[0]}" for rank, (wrong, _, _) in enumerate(ranks) if wrong]
        missing = set(ranks[0][2]).difference(*(here for _, here, _ in ranks))
        faults += [f"{case}: no rank knows {sorted(missing)}"] if missing else []
    assert not faults, "\n".join(faults[:10])


ENTRIES = ("forward", "param", "store")


def test_two_pipelines_of_two_ranks_train_as_two_pipes_that_are_averaged_by_hand(crew4: Crew) -> None:
    schedules = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "looped-bfs")
    check(crew4, [
        {"model": "mixed", "schedule": schedule, "entry": entry, "alone": alone,
         "balance": (2, 2, 2, 2) if schedule in ("interleaved", "zb-v", "looped-bfs") else (3, 5)}
        for entry, schedule, alone in some(product(ENTRIES, schedules, (False, True)))
    ])  # fmt: skip


@pytest.mark.parametrize("loss", ["counted", "weighted"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicas_of_one_process_each_do_the_same(size: int, loss: str, request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(f"crew{size}"), [
        {"model": model, "balance": [2, 3] if model == "plain" else [2, 2], "entry": entry, "alone": alone,
         "loss": loss, "counts": [7, 4, 2, 9][:size]}
        for model, entry, alone in (("plain", "param", True), ("tied", "store", False), ("sparse", "param", False))
    ], in_process=True)  # fmt: skip


def test_a_loss_may_compute_with_parameters_and_stages_may_have_threads_where_a_replica_is_one_process(
    crew2: Crew,
) -> None:
    check(crew2, [
        {"model": "plain", "balance": [2, 2, 1], "entry": "param", "alone": True, "loss": "penalized"},
        {"model": "mixed", "balance": [3, 5], "entry": "store", "alone": True, "workers": "threads"},
        {"model": "mixed", "balance": [3, 5], "entry": "forward", "alone": True, "workers": "threads"},
    ], in_process=True)  # fmt: skip


def test_replicas_may_have_mini_batches_of_other_sizes(crew4: Crew) -> None:
    check(crew4, [
        {"model": "plain", "balance": (2, 3), "entry": entry, "loss": loss, "counts": counts, "schedule": schedule}
        for entry, loss in (("forward", "mean"), ("param", "counted"), ("store", "counted"))
        for counts, schedule in (((9, 1), "1f1b"), ((2, 5), "zb-h1"))
    ])  # fmt: skip


def test_every_kind_of_gradient_is_averaged(crew4: Crew) -> None:
    check(crew4, [
        {"model": model, "balance": (2, 3) if model in ("plain", "half", "without parameters") else (2, 2),
         "entry": entry, "checkpoint": checkpoint, "alone": alone}
        for model in ("plain", "without parameters", "tied", "sparse", "choosing", "strided", "half")
        for entry in ENTRIES
        for checkpoint, alone in (("always", False), ("never", True))
    ])  # fmt: skip


def test_shards_are_even_and_cover_every_parameter_once() -> None:
    for count in range(1, 6):
        for sizes in product(range(4), repeat=4):
            found = shards_of(sizes, count)
            pieces = sorted(piece for share in found for piece in share)
            for number, size in enumerate(sizes):
                own = [(begin, end) for parameter, begin, end in pieces if parameter == number]
                assert own[0][0] == 0 and own[-1][1] == size
                assert all(one[1] == other[0] for one, other in pairwise(own)) and len(dict(own)) == len(own)
            loads = [sum(end - begin for _, begin, end in share) for share in found]
            assert max(loads) - min(loads) <= 1


def test_replicas_begin_with_the_first_ones_values_and_a_copy_trains_alike(crew4: Crew) -> None:
    for found, expected, copied in crew4.run("replica_habits:beginnings"):
        assert differences(found, expected) == [] and len(found) > 2
        assert all(copied.values())


@pytest.mark.parametrize("entry", ["step", "forward"])
def test_equal_halves_give_the_gradients_of_the_plain_module_on_the_whole(crew4: Crew, entry: str) -> None:
    for found, expected in crew4.run("replica_habits:joined_batch", entry):
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)


def test_what_needs_no_gradients_a_replica_does_by_itself(crew4: Crew) -> None:
    ranks = crew4.run("replica_habits:apart")
    for rank in range(2):
        one, other = ranks[rank], ranks[rank + 2]
        names = [name for name in one if "weight" in name or "bias" in name]
        assert names and all(torch.equal(one[name], other[name]) for name in names)
        assert one["loss 0"] != other["loss 0"] and one["loss 1"] == ranks[rank ^ 1]["loss 1"]
    assert not torch.equal(ranks[0]["2.running_mean"], ranks[2]["2.running_mean"])


def test_means_add_up_in_grad(crew4: Crew) -> None:
    for found, expected in crew4.run("replica_habits:accumulated"):
        assert differences(found, expected) == [] and found


def test_the_norm_is_that_of_the_means(crew4: Crew) -> None:
    ranks = crew4.run("replica_habits:clipped")
    for way in range(3):
        together = [{**ranks[first][way][1], **ranks[first + 1][way][1]} for first in (0, 2)]
        assert differences(*together) == [] and ranks[0][way][0] == ranks[3][way][0]
        total = torch.nn.utils.get_total_norm(list(together[0].values()))
        torch.testing.assert_close(total, torch.tensor(0.1, dtype=torch.float64), rtol=1e-5, atol=0)
    assert ranks[0][2][0] > 0.1


def test_gradients_travel_while_earlier_stages_go_backward(crew2: Crew) -> None:
    for events in crew2.run("replica_habits:order_of_events", True):
        assert "".join(event[0] for event in events) == "bb" + "ss" + "b" + "ss"  # gpipe: stages 2 and 1 end first
    for events in crew2.run("replica_habits:order_of_events", False):
        assert "".join(event[0] for event in events) == "bbbs"  # small ones wait for the last


def test_a_store_has_the_order_of_the_modules_in_all_replicas(crew2: Crew) -> None:
    layers = ("0.choices.0", "0.choices.1", "2")
    expected = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
    assert crew2.run("replica_habits:stored") == [expected, expected]


def test_a_gradient_that_is_sparse_on_one_replica_and_dense_on_another_is_refused() -> None:
    table = torch.ones(3, 2)
    with pytest.raises(RuntimeError, match=r"of shape \[3, 2\] is sparse on one replica and dense on another"):
        _mean([table, table.to_sparse()], [None, None], table)


def test_an_overflow_in_one_replica_is_skipped_by_all(crew4: Crew) -> None:
    for found in crew4.run("replica_habits:scaled"):
        assert found == [(8.0, True, True), (4.0, False, True), (4.0, True, True)]


def test_hooks_of_parameters_act_once_on_the_mean(crew4: Crew) -> None:
    for same, seen in crew4.run("replica_habits:hooked"):
        assert all(same.values()) and sorted(seen) == sorted(same)


@pytest.mark.parametrize("how", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_around_a_pipe_over_ranks_gives_the_same_bits(crew4: Crew, how: dict[str, bool]) -> None:
    for same in crew4.run("replica_habits:within_ddp", how):
        assert same and all(same.values())


def test_what_is_no_parameter_keeps_its_own_gradient(crew4: Crew) -> None:
    ranks = crew4.run("replica_habits:captured")
    for found, expected in ranks:
        assert differences(found, expected) == []
    assert all("number" in ranks[rank][0] for rank in (1, 3))
