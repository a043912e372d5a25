"""Which faults are tried, and what must come of each? Chosen at random, by seeds.

    going_on(random, size)    a run with several faults that a script can catch, in a row     exceptions, other calls
    ending(random, kind)      a run with one fault, of which some rank cannot tell            SIGKILL, SIGSTOP, sys.exit

What must come of them is in fault_verdicts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fault_injection import EXCEPTIONS, Fault

from pipeline.distributed.assignment import schedule_over
from scheduler import Action, Kind

HEARTBEAT, TIMEOUT = 1.5, 2.0  # seconds, where a rank goes silent, or is late
ENTRIES = ("step", "step", "gradients", "evaluate", "forward")
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "gpipe", "zb-v", "1f1b")
ENDINGS = (
    "killed in an action", "killed between calls", "killed before its Pipe", "stopped in an action",
    "stopped between calls", "stopped for a while", "too long in a layer", "left the script", "raised in its script",
    "raised before its Pipe", "raised in a post hook", "raised in the optimizer", "killed in the optimizer",
)  # fmt: skip

LATE = ("raised in a post hook", "raised in the optimizer")  # when all ranks have agreed that the step takes place

Round = tuple[str, Fault | None]


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        size: how many ranks.
        schedule, stages, chunks, checkpoint: of the Pipe.
        rounds: an entry point each, and what fails in it.
        first: what fails before there is a Pipe.
        also: what fails on another rank in each round in which one fails.
        goes_on: whether the next call after a fault must work.
        rest: seconds that the others wait after a fault before they go on.
        resume_after: seconds after which a stopped rank goes on.
        timeout, heartbeat: of the Pipe. A small one may be over on a busy machine though all is well.
        kind: what to call it; "": each of its faults has its own name.
    """

    size: int
    schedule: str
    stages: int
    chunks: int
    checkpoint: str
    rounds: tuple[Round, ...] = ()
    first: Fault | None = None
    also: Fault | None = None
    goes_on: bool = True
    rest: float = 0.0
    resume_after: float | None = None
    timeout: float = 60.0
    heartbeat: float = 10.0
    kind: str = ""

    def job(self) -> dict[str, Any]:
        """For fault_script.py."""
        mine = "size", "resume_after", "kind"
        return {name: value for name, value in vars(self).items() if name not in mine}

    @property
    def seconds(self) -> float:
        """After which the run is ended, on a busy machine."""
        return 60.0 + len(self.rounds)


# ------------------------------------------------------------------------------------------------------- choosing


def setting(random: Random, size: int) -> Case:
    """A Pipe."""
    schedule = random.choice(SCHEDULES)
    stages = size * (2 if schedule in ("interleaved", "zb-v") else random.choice((1, 1, 2)))
    chunks = 6 if size == 3 else 4
    return Case(size, schedule, stages, chunks, random.choice(("always", "except_last", "never")))


def going_on(random: Random, size: int, faults: int) -> Case:
    """A run of so many faults that scripts can catch."""
    found = setting(random, size)
    rounds: list[Round] = [("step", None)]
    for _ in range(faults):
        entry = random.choice((*ENTRIES, "pipe"))
        rounds.append((entry, _fault(random, found, entry)))
    return _replaced(found, rounds=(*rounds, ("step", None)))


def ending(random: Random, kind: str, size: int) -> Case:
    """A run with one fault."""
    found = setting(random, size)
    entry = "step" if kind.endswith(("hook", "optimizer")) else random.choice(ENTRIES)
    rank = random.randrange(size)
    place = ("layer", *random.choice(_actions(found, entry, Kind.F)))
    if kind == "too long in a layer":  # one that has waited for another rank before: it is not who waits now
        place = ("layer", *random.choice(_after_waiting(found, entry)))
    if kind.endswith("an action"):
        place = (random.choice(("before", "after")), *random.choice(_actions(found, entry)))
    site, rank_there, action = place
    rounds: tuple[Round, ...] = (("step", None), (entry, None), ("step", None))
    with_fault = {
        "killed in an action": Fault(rank_there, site, "kill", action),
        "killed between calls": Fault(rank, "script", "kill"),
        "stopped in an action": Fault(rank_there, site, "stop", action),
        "stopped between calls": Fault(rank, "script", "stop"),
        "stopped for a while": Fault(rank_there, site, "stop", action),
        "too long in a layer": Fault(rank_there, site, "sleep", action, 5.0),
        "left the script": Fault(rank, "script", "leave"),
        "raised in its script": Fault(rank, "script", "crash"),
        "raised in a post hook": Fault(rank, "post hook", "MainError"),
        "raised in the optimizer": Fault(rank, "optimizer", "ScriptError"),
        "killed in the optimizer": Fault(rank, "optimizer", "kill"),
    }
    before = {"killed before its Pipe": "kill", "raised before its Pipe": "ScriptError"}
    if kind in before:
        first = Fault(rank, "begin", before[kind])
        return _replaced(found, rounds=rounds[:1], first=first, goes_on=False, timeout=TIMEOUT, kind=kind)
    goes_on = kind in ("stopped for a while", "too long in a layer")
    return _replaced(
        found, rounds=(rounds[0], (entry, with_fault[kind]), rounds[2]), goes_on=goes_on, kind=kind,
        rest=4.0 if goes_on else 0.0, resume_after=2.5 if kind == "stopped for a while" else None,
        timeout=TIMEOUT if kind == "too long in a layer" else 60.0,
        heartbeat=HEARTBEAT if kind.startswith(("killed", "stopped")) else 10.0,
    )  # fmt: skip


def _replaced(case: Case, **more: Any) -> Case:
    return Case(**{**case.__dict__, **more})


def _actions(case: Case, entry: str, *kinds: Kind) -> list[tuple[int, str]]:
    """(rank, action) of all that an entry point runs, of these kinds only where any are given."""
    schedule = schedule_over(case.schedule, case.stages, case.chunks, case.size)
    orders = schedule.forward_half() if entry == "evaluate" else schedule.orders
    found = [action for order in orders for action in order]
    rank_of = _rank_of(case)
    return [(rank_of[action.stage], str(action)) for action in found if not kinds or action.kind in kinds]


def _after_waiting(case: Case, entry: str) -> list[tuple[int, str]]:
    """The forwards that need what another rank sends."""
    rank_of = _rank_of(case)
    waiting = {stage for stage in range(1, case.stages) if rank_of[stage] != rank_of[stage - 1]}
    return [place for place in _actions(case, entry, Kind.F) if Action.parse(place[1]).stage in waiting]


def _fault(random: Random, case: Case, entry: str) -> Fault:
    """One that a script can catch."""
    manner = random.choice(list(EXCEPTIONS))
    if entry == "pipe":
        return Fault(random.randrange(case.size), "materialize", manner)
    if random.random() < 0.15:
        others = [name for name in ("step", "evaluate", "forward", "pipe") if name != entry]
        return Fault(random.randrange(case.size), "call", random.choice(others))
    sites = ["before", "after", "layer", "cut"]
    if entry != "evaluate":
        sites += ["gradient"] + ["recompute"] * (case.checkpoint == "always")
    sites += ["target", "loss"] if entry != "forward" else ["gap"]
    sites += ["hook"] if entry in ("step", "gradients") else []
    site = random.choice(sites)
    if site == "hook":
        return Fault(random.randrange(case.size), site, manner)
    if site in ("cut", "target", "gap"):
        return Fault(random.randrange(case.size), site, "ScriptError" if site == "gap" else "refused")
    if site == "loss":
        return Fault(_rank_of(case)[-1], site, manner)
    kinds = {"layer": (Kind.F,), "gradient": (Kind.B, Kind.I), "recompute": (Kind.B, Kind.I)}.get(site, ())
    rank, action = random.choice(_actions(case, entry, *kinds))
    return Fault(rank, site, manner, action)


def _rank_of(case: Case) -> Sequence[int]:
    return schedule_over(case.schedule, case.stages, case.chunks, case.size).placement.lane_of
