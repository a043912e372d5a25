"""Whatever fails on one rank, all know of it soon, nothing has changed, nothing is left; where it can, it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from cover import either
from fault_cases import ENDINGS, Case, ending, going_on
from fault_injection import Fault
from fault_launcher import Launcher, Ran
from fault_verdicts import SOON, Verdict, judged, told


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as found:
        yield found


def check(launcher: Launcher, case: Case) -> list[Ran]:
    ran = launcher.run(case.size, case.job(), case.seconds, case.resume_after)
    wrong = [f"{verdict.kind}: {verdict.what}: {words}" for verdict in judged(case, ran) for words in verdict.wrong]
    assert not wrong, "\n".join([*wrong, told(case, ran)])
    return ran


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_exception_on_one_rank_is_raised_on_all_and_the_next_call_gives_what_it_should(
    launcher: Launcher, size: int
) -> None:
    check(launcher, going_on(Random(f"faults {size}"), size, either(3, 5)))


ALIKE = ("killed before its Pipe", "raised in its script", "stopped between calls")  # as others are: for the soak


@pytest.mark.parametrize("kind", [kind for kind in ENDINGS if kind not in ALIKE])
def test_a_rank_that_is_gone_ends_the_others_with_who_waited_for_what(launcher: Launcher, kind: str) -> None:
    random = Random(f"ending {kind}")
    check(launcher, ending(random, kind, random.choice((2, 3))))


def test_rank_0_which_hosts_the_store_may_be_the_one_that_is_gone(launcher: Launcher) -> None:
    """Until then the others could ask the store why a connection broke."""
    for kind in ("killed in an action", "stopped in an action"):
        cases = (ending(Random(seed), kind, 2) for seed in range(99))
        check(launcher, next(case for case in cases for _, fault in case.rounds if fault and fault.rank == 0))


@pytest.mark.parametrize("manner", ["KeyError", "KeyboardInterrupt"])
def test_of_two_that_fail_in_one_call_the_first_is_everyones_but_ctrl_c_stays_what_it_is(
    launcher: Launcher, manner: str
) -> None:
    first, second = Fault(0, "open", "ValueError"), Fault(1, "open", manner, seconds=0.5)
    case = Case(2, "1f1b", 2, 4, "always", rounds=(("step", None), ("step", first)), also=second)
    ran = launcher.run(2, case.job(), case.seconds)
    errors = [each.find("raised")[0] for each in ran]
    assert errors[0]["type"] == "ValueError", told(case, ran)
    assert errors[1]["type"] == (manner if manner == "KeyboardInterrupt" else "ValueError"), told(case, ran)
    assert manner == "KeyboardInterrupt" or "rank 1 failed, too: KeyError: 'missing'" in errors[1]["notes"]
    for each in ran:
        assert [after["wrong"] for after in each.find("went on")] == [[], []] and each.code == 0, told(case, ran)


def test_a_pipe_that_was_not_built_is_not_counted(launcher: Launcher) -> None:
    """One rank alone had begun it; the next one has the same number on all."""
    alone, later = Fault(1, "call", "pipe"), Fault(0, "materialize", "ValueError")
    check(launcher, Case(2, "1f1b", 2, 4, "always", rounds=(("step", None), ("step", alone), ("pipe", later))))


def test_a_call_whose_ranks_did_not_all_come_to_connect_can_be_made_once_more(launcher: Launcher) -> None:
    """Those that came wait for channels of which the rank that did not come knows nothing."""
    fault = Fault(1, "connect", "ScriptError")
    for size in (2, 4):
        case = Case(size, "1f1b", size, 4, "always", rounds=(("step", fault), ("step", None)))
        ran = launcher.run(size, case.job(), case.seconds)
        for each in ran:
            raised, went_on = each.find("raised"), each.find("went on")
            assert [error["type"] for error in raised] == ["ScriptError"], told(case, ran)
            assert raised[0]["at"] - ran[1].find("fault")[0]["at"] < SOON
            assert [after["wrong"] for after in went_on] == [[], []] and each.code == 0, told(case, ran)


def _changed(ran: list[Ran], what: str, **more: Any) -> None:
    ran[0].find(what)[0].update(more)


def _leave(ran: list[Ran]) -> None:
    ran[1].code = None


MISSED: dict[str, Callable[[list[Ran]], Any]] = {
    "raised nothing": lambda ran: ran[0].told.remove(ran[0].find("raised")[0]),
    "raised KeyError": lambda ran: _changed(ran, "raised", type="KeyError"),
    "instead of": lambda ran: _changed(ran, "raised", words="something else"),
    "does not tell": lambda ran: _changed(ran, "raised", notes=[]),
    "no traceback": lambda ran: _changed(ran, "raised", cause=""),
    "it took 60": lambda ran: _changed(ran, "raised", at=ran[0].find("raised")[0]["at"] + 60.0),
    "has changed": lambda ran: _changed(ran, "state", changed=["0.weight"]),
    "went on wrongly": lambda ran: ran[0].find("went on")[1].update(wrong=["0.weight"]),
    "did not go on": lambda ran: ran[0].told.remove(ran[0].find("went on")[1]),
    "left threads": lambda ran: _changed(ran, "gone", threads=["a thread"]),
    "did not end": _leave,
    "ended with 3": lambda ran: setattr(ran[0], "code", 3),
    "did not take place": lambda ran: ran[1].told.remove(ran[1].find("fault")[0]),
}


def test_the_verdict_misses_nothing(launcher: Launcher) -> None:
    """The harness: a run that went well, and each thing that might not have."""
    fault = Fault(1, "layer", "ScriptError", "1F2")
    case = Case(2, "1f1b", 2, 4, "always", rounds=(("step", None), ("step", fault)))
    ran = check(launcher, case)
    for words, change in MISSED.items():
        other = deepcopy(ran)
        change(other)
        (verdict,) = judged(case, other)
        assert isinstance(verdict, Verdict) and any(words in each for each in verdict.wrong), (words, verdict.wrong)
