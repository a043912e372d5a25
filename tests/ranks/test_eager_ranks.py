"""Law: an EagerUpdate over ranks leaves the bits that the optimizer itself leaves, there and in one process."""

from __future__ import annotations

import pytest
from cover import some
from crew import Crew
from one_and_many import agree_on

SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}  # stages on a rank
HOW = [  # for two ranks; the first two for three, the first one for four
    ("mixed", "momentum", ("counted", "module", "mean")), ("always", "adamw", ("counted",)),
    ("never", "momentum", ("mean",)), ("mixed", "adamw", ("mean",)), ("never", "adamw", ("counted",)),
]  # fmt: skip
COUNTS = {2: 5, 3: 2, 4: 1}


def test_steps_leave_the_bits_of_ordinary_steps_under_every_schedule(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    agree_on((crew2, crew3, crew4), "rank_eager:stepped", lambda size: [
        (many * size, schedule, *how, how[0] == "mixed")
        for schedule, many in SCHEDULES.items() for how in HOW[: COUNTS[size]]
    ])  # fmt: skip


def test_weights_that_ranks_have_in_common_are_updated_alike_on_all_of_them(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    crews = crew2, crew3, crew4
    agree_on(crews, "rank_eager:of_model", lambda size: [
        (model, size, schedule, optimizer, loss)
        for model in ("ends", "middle", "many")
        for schedule, optimizer, loss in (("gpipe", "momentum", "counted"), ("1f1b", "adamw", "mean"))
    ])  # fmt: skip
    agree_on(crews, "rank_eager:clipped", lambda size: [
        (model, size, "two_pass", 0.05, optimizer, "counted")
        for model in ("ends", "many") for optimizer in ("momentum", "adamw")
    ])  # fmt: skip
    agree_on(crews, "rank_eager:backward", lambda size: [
        (model, size, optimizer, parts) for model, optimizer, parts in (("ends", "adamw", 1), ("many", "momentum", 2))
    ])  # fmt: skip


def test_ranks_without_parameters_or_without_trained_ones_take_part(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    agree_on((crew2, crew3, crew4), "rank_eager:of_model", lambda size: [
        (model, size, "1f1b", optimizer, loss)
        for model in ("first bare", "last bare", "frozen")
        for optimizer, loss in (("momentum", "mean"), ("adamw", "counted"))
    ])  # fmt: skip


def test_a_rank_without_parameters_has_no_gradient_to_drop(crew2: Crew) -> None:
    agree_on([crew2], "rank_eager:after_a_backward", lambda size: [()])


def test_rules_do_what_they_do_to_the_gradients_of_a_step(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    agree_on((crew2, crew3, crew4), "rank_eager:ruled", lambda size: [(size, "mean"), (size, "counted")])


def test_clipping_is_that_by_the_norm_over_all_ranks(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    how = [(0.05, "adamw", "mean"), (1e3, "adamw", "counted"), (0.05, "momentum", "counted")]
    agree_on((crew2, crew3, crew4), "rank_eager:clipped", lambda size: [
        (model, size, "two_pass", *each)
        for model in ("layered", "first bare", "last bare", "frozen", "not a number") for each in how[: 5 - size]
    ])  # fmt: skip


def test_an_eager_backward_is_a_backward_and_a_step(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    agree_on((crew2, crew3, crew4), "rank_eager:backward", lambda size: [
        (model, size, optimizer, parts)
        for model, optimizer in (("layered", "adamw"), ("first bare", "momentum"), ("last bare", "adamw"),
                                 ("frozen", "adamw"))
        for parts in (1, 2)
    ])  # fmt: skip


def test_an_eager_backward_refuses_a_norm_that_each_rank_would_take_of_its_own(crew2: Crew) -> None:
    for kind, words, _, _ in crew2.run("rank_eager:clipped_backward"):
        assert kind == "ValueError" and "by a norm of its own. Use pipe.step" in words


def test_replicas_step_as_with_the_optimizer_itself(crew4: Crew) -> None:
    cases = some(
        {"model": model, "balance": balance, "loss": loss, "optimizer": optimizer, "alone": alone, "clip": clip,
         "norm": norm}
        for model, balance in (("mixed", (3, 5)), ("plain", (2, 3)), ("tied", (2, 2)))
        for loss, optimizer, alone in (("mean", "momentum", False), ("counted", "adamw", True))
        for clip, norm in ((None, 0.05), ("two_pass", 0.05), ("two_pass", 1e3))
    )  # fmt: skip
    for rank, results in enumerate(crew4.run("rank_eager:replicated", cases, timeout=120.0)):
        faults = [f"{case}, rank {rank}: {wrong}" for case, wrong in zip(cases, results, strict=True) if wrong]
        assert not faults, "\n".join(faults)


# --------------------------------------------------------------------------------------------------------- failures


def test_a_backward_that_fails_on_one_rank_leaves_the_step_torn_on_all_until_that_is_acknowledged(
    crew2: Crew, crew3: Crew
) -> None:
    cases = ((crew2, 0, 3, 1), (crew2, 1, 1, -1), (crew3, 1, 3, 2), (crew3, 0, 2, 2))
    for crew, place, countdown, behind in cases:
        for rank, found in enumerate(crew.run("rank_eager:torn", place, countdown, behind)):
            kind, words, _, seconds = found["first"]
            assert (kind, words) == ("ZeroDivisionError", "this backward breaks") and seconds < 10, found
            kind, words, _, seconds = found["second"]
            assert kind == "RuntimeError" and seconds < 10, found
            assert "the step before has failed half-way: some parameters are updated and some are not" in words
            assert "others perhaps on other ranks; then " in words and "acknowledge_torn_step()" in words
            assert found["third"][0] == "" and found["right"], found
            assert found["torn"] == [True, True, False]
            assert found["moved"] == (rank == behind), (place, rank, found)


def test_an_optimizer_that_fails_on_one_rank_ends_the_call_on_all(crew2: Crew, crew3: Crew) -> None:
    for crew, place in ((crew2, 0), (crew2, 1), (crew3, 1)):
        for (kind, words, _, seconds), was_torn, then, is_torn in crew.run("rank_eager:refusing", place):
            assert (kind, words) == ("OverflowError", "this optimizer breaks") and seconds < 10
            assert was_torn and not is_torn and then[0] == ""


@pytest.mark.parametrize(
    ("clip", "other"), [(None, "SGD"), ("two_pass", "EagerUpdate(SGD, clip='two_pass' to 1.0)")]
)  # fmt: skip
def test_ranks_that_do_not_update_in_the_same_way_are_refused(
    crew2: Crew, crew3: Crew, clip: str | None, other: str
) -> None:
    for crew, apart in ((crew2, 0), (crew2, 1), (crew3, 1)):
        for (kind, words, _, seconds), is_torn, moved, is_right in crew.run("rank_eager:mismatch", apart, clip):
            assert kind == "MismatchError" and seconds < 10
            assert "the options differ" in words
            assert "optimizer=EagerUpdate(SGD, clip=None)" in words and f"optimizer={other}" in words
            assert not is_torn and not moved and is_right


# ------------------------------------------------------------------------------------------------------------- when


@pytest.mark.parametrize(("clip", "loss"), [(None, "mean"), (None, "counted"), ("two_pass", "counted")])
def test_the_last_rank_updates_while_the_first_still_goes_backward(crew2: Crew, clip: str | None, loss: str) -> None:
    (updates, ends), (updates_of_last, _) = crew2.run("rank_eager:moments", clip, loss)
    assert len(updates_of_last) == len(updates) == 2 and len(ends) == (4 if clip is None else 8)
    assert max(updates_of_last) < max(ends) < min(updates)
