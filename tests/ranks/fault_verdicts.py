"""Was a fault told as it must be? On every rank, with the right words, soon, and with nothing changed or left behind.

    Case, what the ranks told --judged--> a Verdict for each fault
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fault_cases import LATE, TIMEOUT, Case
from fault_injection import AS_TEXT, EXCEPTIONS, Fault
from fault_launcher import Ran

from scheduler import Action

SOON = 10.0  # seconds after a fault until every rank knows of it; and after its last words until a rank has ended
KINDS = {
    "before": "raised in an action", "after": "raised in an action", "layer": "raised in a layer's forward",
    "recompute": "raised in a recomputation", "gradient": "raised in a layer's backward", "loss": "raised in the loss",
    "cut": "an input that cannot be cut", "target": "a target that does not fit", "call": "made another call",
    "gap": "left a call out", "materialize": "raised while a Pipe was built", "hook": "raised in a parameter's hook",
}  # fmt: skip
TORN = "after all ranks had agreed that it took place"
SILENCES = {
    "killed": r"lost a connection|does not answer|lost the store|ended its script",
    "stopped": r"does not answer.*heartbeat=",
    "too long": r"nothing moves on any rank for .*timeout=",
    "left": r"ended its script|lost the store",
    "raised": r"ended its script|lost the store",
}


class Verdict(NamedTuple):
    """On one fault.

    Attributes:
        kind: of the fault.
        what: which, in which run.
        seconds: from the fault until the last rank that lives has raised.
        wrong: what is not as it must be.
    """

    kind: str
    what: str
    seconds: float
    wrong: list[str]


def judged(case: Case, ran: Sequence[Ran]) -> list[Verdict]:
    """A verdict on each fault of a run; what is wrong with the run as a whole is in the first."""
    of_run = [f"rank {each.rank} {words}" for each in ran for words in _left_behind(case, each)]
    found = _of_ending(case, ran) if case.kind else _of_rounds(case, ran)
    return [found[0]._replace(wrong=[*of_run, *found[0].wrong]), *found[1:]]


def told(case: Case, ran: Sequence[Ran]) -> str:
    """A run, for a person who looks for what went wrong."""
    lines = [str(case)]
    begun = min([each["at"] for one in ran for each in one.told], default=0.0)
    for one in ran:
        lines.append(f"rank {one.rank}: code {one.code}, ended {one.ended and round(one.ended - begun, 2)}")
        lines += [f"  {each['at'] - begun:.2f} {str(each)[:1500]}" for each in one.told]
        lines += [f"  wrote: {one.output[-3000:]}"] * bool(one.output.strip())
        lines += [f"  was at: {one.stacks}"] * bool(one.stacks)
    return "\n".join(lines)


def _left_behind(case: Case, ran: Ran) -> Iterator[str]:
    """Processes and threads."""
    fault = _only_fault(case)
    is_faulty = fault is not None and fault.rank == ran.rank
    if is_faulty and fault is not None and fault.manner == "stop" and case.resume_after is None:
        return
    if ran.code is None:
        yield "did not end"
        return
    expected = int(case.first is not None and not case.goes_on)
    if is_faulty and fault is not None:
        expected = {"kill": -9, "crash": 1}.get(fault.manner, expected)
    if ran.code != expected:
        yield f"ended with {ran.code} instead of {expected}"
    gone = ran.find("gone")
    held = fault is not None and fault.rank == 0 and fault.manner == "stop"  # by the store, which rank 0 hosts
    if gone and gone[0]["threads"] and not held:
        yield f"left threads: {gone[0]['threads']}"
    if gone and ran.ended is not None and ran.ended > gone[0]["at"] + SOON:
        yield "took long to end"


def _only_fault(case: Case) -> Fault | None:
    """Of an ending."""
    if case.first is not None:
        return case.first
    return next((fault for _, fault in case.rounds if fault is not None), None) if case.kind else None


# ------------------------------------------------------------------------------------------ faults that are caught


def _of_rounds(case: Case, ran: Sequence[Ran]) -> list[Verdict]:
    found = []
    counts = dict.fromkeys(range(case.size), 0)
    for number, (entry, fault) in enumerate(case.rounds):
        if fault is None:
            continue
        begun = ran[fault.rank].find("fault")[counts[fault.rank] :]
        counts[fault.rank] += 1
        what = f"{fault} in round {number}, {entry} of {case.size} ranks, {case.schedule}"
        if not begun:
            found.append(Verdict(KINDS[fault.site], what, 0.0, ["it did not take place"]))
            continue
        errors = [_first(each, "raised", number) for each in ran]
        ends = [error["at"] for error in errors if error]
        seconds = max(ends, default=begun[0]["at"]) - begun[0]["at"]
        wrong = [f"it took {seconds:.1f} s"] * (seconds > SOON)
        for each, error in zip(ran, errors, strict=True):
            wrong += [f"rank {each.rank} {words}" for words in _of_round(number, entry, fault, each, error)]
        found.append(Verdict(KINDS[fault.site], what, seconds, wrong))
    return found


def _first(ran: Ran, what: str, number: int) -> dict[str, Any] | None:
    return next((each for each in ran.find(what) if each["number"] == number), None)


def _of_round(number: int, entry: str, fault: Fault, ran: Ran, error: dict[str, Any] | None) -> Iterator[str]:
    if error is None:
        yield "raised nothing"
    else:
        yield from _of_error(entry, fault, ran.rank, error)
    state, after = _first(ran, "state", number), _first(ran, "went on", number)
    if state is None or state["changed"]:
        yield f"has changed {state and state['changed']}"
    if after is None:
        yield f"did not go on: {_first(ran, 'lost', number)}"
    elif after["wrong"]:
        yield f"went on wrongly: {after['wrong']}"


def _of_error(entry: str, fault: Fault, rank: int, error: dict[str, Any]) -> Iterator[str]:
    """Type, words, and the place in the notes."""
    kind, words = _expected(fault, is_there=rank == fault.rank)
    if error["type"] != kind or not re.search(words, error["words"]):
        yield f"raised {error['type']}: {error['words'][:300]!r} instead of {kind}: {words!r}"
    if fault.site in ("call", "gap"):
        return
    notes = "\n".join(error["notes"])
    if fault.action:
        action = Action.parse(fault.action)
        place = rf"stage {action.stage}\b.*, chunk {action.chunk}, {action}"
        if not re.search(place, notes):
            yield f"does not tell {place!r} but {notes!r}"
    if rank == fault.rank:
        if f"this is rank {rank}, in " not in notes:
            yield f"does not tell where it is but {notes!r}"
    else:
        calls = {"gradients": "step", "forward": "forward|backward of call", "pipe": "Pipe"}
        place = rf"on rank {fault.rank}: .*in ({calls.get(entry, entry)})\b"
        if not re.search(place, notes):
            yield f"does not tell {place!r} but {notes!r}"
        if f"on rank {fault.rank} (this is rank {rank})" not in error["cause"] or "File " not in error["cause"]:
            yield f"has no traceback of rank {fault.rank}: {error['cause']!r}"


def _expected(fault: Fault, is_there: bool) -> tuple[str, str]:
    """The type's name, and a pattern for the words."""
    if fault.site in ("call", "gap"):
        return "MismatchError", "differ between the ranks: rank"
    if fault.site == "cut":
        return "TypeError", "holds a builtins.set"
    if fault.site == "target":
        return "ValueError", "the target has 11 rows but the input has 12"
    original = EXCEPTIONS[fault.manner]()
    name = type(original).__name__
    if fault.manner == "MuteError":
        return (name, "") if is_there else ("RankError", "MuteError: .its message cannot be had")
    words = re.escape(str(original)[:1000])
    return ("RankError", f"{name}: {words}") if fault.manner in AS_TEXT and not is_there else (name, f"^{words}")


# ------------------------------------------------------------------------------------------------ faults that end


def _of_ending(case: Case, ran: Sequence[Ran]) -> list[Verdict]:
    fault = _only_fault(case)
    assert fault is not None  # a case of one kind has one
    what = f"{fault} of {case.size} ranks, {case.schedule}, rounds {[entry for entry, _ in case.rounds]}"
    begun = ran[fault.rank].find("fault")
    if not begun:
        return [Verdict(case.kind, what, 0.0, ["it did not take place"])]
    others = [each for each in ran if each.rank != fault.rank]
    if case.first is not None:
        return [_before_pipe(case, what, begun[0]["at"], others)]
    errors = [_errors(each) for each in others]
    seconds = max([each[0]["at"] for each in errors if each], default=begun[0]["at"]) - begun[0]["at"]
    wrong = [f"it took {seconds:.1f} s"] * (seconds > SOON)
    for each, raised in zip(others, errors, strict=True):
        wrong += [f"rank {each.rank} {words}" for words in _of_survivor(case, each, raised)]
    own = _errors(ran[fault.rank])
    if case.goes_on:
        wrong += [f"rank {fault.rank} {words}" for words in _of_survivor(case, ran[fault.rank], own)]
    if case.kind in LATE:
        wrong += [f"rank {fault.rank} {words}" for words in _of_error("step", fault, fault.rank, own[0])]
        wrong += [f"rank {each.rank} did not go on" for each in ran if not _first(each, "went on", 2)]
    return [Verdict(case.kind, what, seconds, wrong)]


def _errors(ran: Ran) -> list[dict[str, Any]]:
    return [each for each in ran.told if each["what"] in ("raised", "lost")]


def _of_survivor(case: Case, ran: Ran, errors: Sequence[dict[str, Any]]) -> Iterator[str]:
    """It knows of a silence, nothing has changed; the next call works, or fails soon as well."""
    if not errors:
        yield "raised nothing"
        return
    if case.kind in LATE:
        return (yield from _of_late(case, ran, errors[0]))
    words = SILENCES[next(kind for kind in SILENCES if case.kind.startswith(kind))]
    if errors[0]["type"] != "RankError" or not re.search(words, errors[0]["words"]):
        yield f"raised {errors[0]['type']}: {errors[0]['words']!r} instead of RankError: {words!r}"
    fault = _only_fault(case)
    who, where = r"\d+", ""
    if fault is not None and fault.manner == "sleep":
        who, where = str(fault.rank), f"at {fault.action} in "
    if not re.search(rf"rank {who} (is|was|waited) {where}", errors[0]["words"]):
        yield f"does not tell who waited for what: {errors[0]['words']!r}"
    state = _first(ran, "state", 1)
    if state is None or (state["changed"] and case.kind != "killed in the optimizer"):
        yield f"has changed {state and state['changed']}"
    if case.kind == "killed in the optimizer":
        return
    if case.goes_on:
        after = [each for number in (1, 2) if (each := _first(ran, "went on", number))]
        if len(after) < 2 or after[0]["wrong"] or after[1]["wrong"]:
            yield f"did not go on rightly: {after} {errors[1:]}"
        return
    if len(errors) < 2 or errors[1]["type"] != "RankError":
        yield f"did not raise a RankError in the next call: {errors[1:]}"
    elif errors[1]["at"] - errors[0]["at"] > SOON:
        yield f"noticed only after {errors[1]['at'] - errors[0]['at']:.1f} s that the next call cannot be"


def _of_late(case: Case, ran: Ran, error: dict[str, Any]) -> Iterator[str]:
    """The step may have taken place here: it tells of the rank where it did not."""
    fault = _only_fault(case)
    assert fault is not None
    yield from _of_error("step", fault, ran.rank, error)
    if TORN not in str(error["notes"]):
        yield f"does not tell that the step is torn: {error['notes']}"
    if error["what"] != "raised" or error["number"] != 1:
        yield f"did not raise in that step: {error}"


def _before_pipe(case: Case, what: str, begun: float, others: Sequence[Ran]) -> Verdict:
    """The others wait for a rank that never comes, in torch.distributed."""
    ends = [each.ended for each in others if each.ended is not None]
    seconds = max(ends, default=begun) - begun
    wrong = [f"it took {seconds:.1f} s"] * (seconds > SOON + TIMEOUT)
    for each in others:
        if not re.search(r"(?i)timed out after|has timed out|connection was likely closed", each.output):
            wrong.append(f"rank {each.rank} wrote {each.output[-1000:]!r}")
    return Verdict(case.kind, what, seconds, wrong)
