"""Law: what fails, or is not the same, in one replica of a pipeline is an error in all, soon and in words."""

from __future__ import annotations

import re
import signal

import pytest
from crew import Crew
from crew_worker import Returned

CASES = [
    (replica, place, when, entry)
    for number, (when, entry) in enumerate([
        ("forward", "step"), ("backward", "step"), ("loss", "step"), ("_mean", "step"), ("_joined", "step"),
        ("forward", "forward"), ("backward", "forward"), ("_mean", "forward"), ("_joined", "forward"),
        ("forward", "step"), ("hook", "step"), ("hook", "step"),
    ])
    for replica, place in [(number % 2, 1 if when == "loss" else number // 2 % 2)]
]  # fmt: skip
WORDS = {
    "forward": ("ValueError", "this forward breaks"),
    "backward": ("ZeroDivisionError", "this backward breaks"),
    "loss": ("KeyError", "'no such loss'"),
    "hook": ("ArithmeticError", "this hook breaks"),
    "_mean": ("MemoryError", "no room for a mean"),
    "_joined": ("MemoryError", "no room for a mean"),
}


@pytest.mark.parametrize("in_process", [False, True])
def test_a_failure_of_one_rank_of_one_pipeline_fails_the_call_on_all_and_the_next_call_works(
    in_process: bool, request: pytest.FixtureRequest
) -> None:
    crew = request.getfixturevalue("crew2" if in_process else "crew4")
    cases = [(replica, 0 if in_process else place, when, entry) for replica, place, when, entry in CASES]
    for case, *ranks in zip(cases, *crew.run("replica_faults:broken_once", cases, in_process), strict=True):
        for rank, ((kind, words, notes, seconds), is_right) in enumerate(ranks):
            assert (kind, words) == WORDS[case[2]], (case, rank, kind, words, notes)
            assert is_right and seconds < 10, (case, rank, seconds)
            where = f"replica {case[0]} (ranks {[2 * case[0], 2 * case[0] + 1]} of the world, here 0 to 1), "
            is_told = any(note.startswith(f"on rank {case[1]}: ") and where in note for note in notes)
            assert is_told == (not in_process and rank // 2 != case[0]), (case, rank, notes)


def test_what_fails_after_all_have_agreed_is_told_to_the_others_in_the_same_call(crew4: Crew) -> None:
    for first, then in crew4.run("replica_faults:torn"):
        kind, words, notes, seconds = first
        assert (kind, words) == ("OverflowError", "this optimizer breaks") and seconds < 10
        assert any("after all" in note and "had agreed that it took place" in note for note in notes), notes
        assert then[0] == ""


def test_a_backward_that_failed_is_right_the_second_time(crew4: Crew) -> None:
    for error, same in crew4.run("replica_faults:backward_again"):
        assert error[0] == "ZeroDivisionError" and same and all(same)


@pytest.mark.parametrize("in_process", [False, True])
def test_a_call_that_goes_on_is_not_given_up(in_process: bool, request: pytest.FixtureRequest) -> None:
    crew = request.getfixturevalue("crew2" if in_process else "crew4")
    for kind, words, _, seconds in crew.run("replica_faults:slow", in_process):
        assert (kind, words) == ("", "") and seconds > 1.2


@pytest.mark.parametrize(("replica", "place", "how"), [(1, 0, signal.SIGKILL), (0, 1, signal.SIGSTOP)])
def test_a_rank_that_dies_or_stops_ends_the_call_on_all_others(
    crew4: Crew, replica: int, place: int, how: signal.Signals
) -> None:
    gone = 2 * replica + place
    outcomes = crew4.outcomes("replica_faults:lost_once", replica, place, int(how), lost=[gone])
    for rank, outcome in enumerate(outcomes):
        if rank == gone:
            continue
        assert isinstance(outcome, Returned), outcome
        for kind, words, _, seconds in outcome.value:  # then, and in the next call
            assert kind == "RankError" and seconds < 15, (rank, kind, words, seconds)
            assert any(each in words for each in ("does not answer since", "lost a connection")), words
            assert ("the replicas (ranks" in words or "replica " in words) == (rank // 2 != replica), words


DIFFERENCES = {
    "balance": r"the settings differ .* rank 0: balance \[2, 3\]; rank 1: balance \[3, 2\]",
    "model": r"the settings differ .* rank 0: balance \[2, 6\]; 0.weight: \[6, 4\] .* rank 1: balance \[2, 3\]",
    "chunks": "the settings differ .* rank 0: chunks 3; rank 1: chunks 4",
    "options": "the options differ .*clip_grad_norm=None.*clip_grad_norm=1.0",
    "modes": "the modes differ .* rank 0: train.*; rank 1: eval",
    "entry": "the calls differ .* rank 0: step of Pipe 0, .*; rank 1: backward of Pipe 0, .* of forward of Pipe 0",
    "number": "the calls differ .* rank 0: step of Pipe 0, call 2 .*; rank 1: step of Pipe 0, call 3 ",
    "loaded": "the states differ .* rank 0: not loaded; rank 1: loaded since the last call with gradients",
    "frozen": r"the parameters differ .* parameter 0 of shape .* is trained; .*parameter 0 of shape .* is frozen",
}


def test_replicas_that_do_not_do_the_same_are_told_so_and_the_next_step_works(crew4: Crew) -> None:
    for results in crew4.run("replica_faults:mismatches"):
        assert [what for what, _, _ in results] == list(DIFFERENCES)
        for what, (kind, words, _, seconds), are_equal in results:
            assert kind == "MismatchError" and re.search(DIFFERENCES[what], words), (what, kind, words)
            assert re.match(r"the replicas of a Pipe \(ranks \[(0, 2|1, 3)\] of the world, here 0 to 1\) do not", words)
            assert are_equal and seconds < 10, what


def test_replicas_whose_losses_have_other_parameters_are_told_so(crew2: Crew) -> None:
    for (kind, words, _, _), then in crew2.run("replica_faults:other_losses"):
        assert kind == "MismatchError" and "rank 1: a parameter of shape [] that is not the module's" in words
        assert then[0] == ""


def test_gradients_that_differ_within_one_replica_reach_no_replica(crew4: Crew) -> None:
    for (kind, words, _, _), before, after in crew4.run("replica_faults:other_gradients"):
        assert kind == "MismatchError" and words.startswith("the gradients of the output differ between the ranks")
        assert not before and after


def test_a_rank_that_comes_too_late_to_a_call_comes_in_time_to_the_next(crew4: Crew) -> None:
    for found, has_gradients in crew4.run("replica_faults:late"):
        assert [kind for kind, _, _, _ in found] == ["KeyError", "RankError", ""], found
        assert has_gradients


REFUSALS = {
    "nowhere": r"replicas=\.\.\. says who has the same stages, but nothing says where the stages are",
    "the same": r"replicas has ranks \[0, 1, 2, 3\] and group has ranks \[., .\], so ranks \[., .\] would be replicas",
    "no group": "replicas is 'dp'",
    "second order": "create_graph=True cannot go through a Pipe",
    "within": "was begun within another call over ranks",
    "within replicas": "was begun within another call over ranks",
    "ddp": r"DistributedDataParallel within the nn.Sequential: 1 \(DistributedDataParallel\)",
    "sync": r"SyncBatchNorm in a Pipe over ranks: 1.0 \(SyncBatchNorm\)",
    "sync replicas": r"SyncBatchNorm in a Pipe over ranks: 1.0 \(SyncBatchNorm\)",
}


def test_what_cannot_be_is_refused_in_words(crew4: Crew) -> None:
    for results in crew4.run("replica_habits:refused"):
        assert [what for what, _ in results] == list(REFUSALS)
        for what, (_, words, _, _) in results:
            assert re.search(REFUSALS[what], words), (what, words)


def test_sharded_layers_are_refused_in_words(crew4: Crew) -> None:
    for layer, everything, tensors in crew4.run("replica_habits:sharded"):
        assert layer[1][0] == "ValueError" and "FSDP within the nn.Sequential: 2 (FSDPLinear)" in layer[1][1]
        assert everything[1][0] == "ValueError" and "itself (FSDPSequential)" in everything[1][1]
        assert "DTensor parameters in a Pipe over ranks: 0.weight, 0.bias" in tensors[1][1]
