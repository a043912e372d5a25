"""Where does the time of a step over two ranks go: control, messages, computing, the engine; and which functions?

    step = enter + open + begin + actions (take, stage, put) + end + agree + hand over + leave + the rest

Whose time: this thread's on its core, that of other threads of the process (gloo moves data in one of its own, on the
same core), and neither: waiting for the other rank.

The parts: a clock round each of the functions in PARTS, on both ranks. What a part takes is its own: the parts that it
calls are not counted in it, so that they add up to the step. "receive" has the waiting for the other rank in it,
"stage" torch's own work; what gloo's thread takes shows in whatever it interrupts. "thread" is the time of this thread
on its core, without waiting, gloo and other processes.

The functions: Python's cProfile on one rank, in time of this thread (waiting and gloo's thread left out), less what its
hooks take: as much for every call, half of it in the caller, so that the whole is as long as without them. What runs in
C++ shows under the built-in that was called.
"""

from __future__ import annotations

import cProfile
import pkgutil
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

from ranks_contenders import Case, Contender, Shape, contenders, prepared, zero_grad
from ranks_launch import Pair, start_together

PARTS = {
    "enter, leave: a call begins, ends": (
        "pipeline.distributed.communicator:DistributedCommunicator.__enter__",
        "pipeline.distributed.communicator:DistributedCommunicator.__exit__",
    ),
    "open: do all make the same call": ("pipeline.distributed.communicator:DistributedCommunicator.open",),
    "begin: expect the phase's messages": ("pipeline.distributed.mailbox:RankMailbox.begin",),
    "stage: F": ("pipeline.stage.stage:StageRun.forward",),
    "stage: B or I": ("pipeline.stage.stage:StageRun.backward",),
    "stage: W": ("pipeline.stage.stage:StageRun.weights",),
    "loss": ("pipeline.entry.step:LossEnd.__call__",),
    "mailbox: put": (
        "pipeline.distributed.mailbox:RankMailbox.put", "pipeline.distributed.mailbox:RankMailbox.put_grads",
    ),
    "mailbox: take": (
        "pipeline.distributed.mailbox:RankMailbox.take", "pipeline.distributed.mailbox:RankMailbox.take_grads",
    ),
    "link: send": ("pipeline.transports.link:Sender.send",),
    "link: reap what was sent": ("pipeline.transports.link:Sender.reap",),
    "link: receive, with waiting": ("pipeline.transports.link:Receiver.receive",),
    "action: the rest of it": ("pipeline.execution.execution:Execution._perform",),
    "end: all has arrived": ("pipeline.distributed.mailbox:RankMailbox.end",),
    "agree: loss and verdict": ("pipeline.distributed.communicator:DistributedCommunicator.agree",),
    "drive: whose turn is it, and the generator": ("pipeline.execution.execution:Execution.run",),
    "call: made for this step": (
        "pipeline.execution.execution:Execution.__init__", "pipeline.execution.call:Call.__init__",
    ),
    "call: before and after the actions": ("pipeline.execution.call:Call.run_forward",),
    "call: let go": ("pipeline.execution.call:Call.release",),
    "hand over: to .grad": ("pipeline.entry.sinks:collect", "pipeline.entry.sinks:GradSink.take"),
    "step: the rest of it": ("pipeline.pipe:Pipe.step",),
}


CLOCKS = (time.perf_counter, time.thread_time, time.process_time)


class Clocks:
    """Calls of parts, their own time and that of this thread: a part's clocks stand while a part that it calls runs."""

    def __init__(self) -> None:
        self._found = {part: [0.0, 0.0, 0.0] for part in PARTS}
        self._inner = [(0.0, 0.0)]  # of each part under way, what its parts took

    def round(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, clocked."""

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._inner.append((0.0, 0.0))
            start, thread = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start, time.thread_time() - thread
                inner = self._inner.pop()
                outer = self._inner[-1]
                self._inner[-1] = outer[0] + took[0], outer[1] + took[1]
                found = self._found[part]
                found[0] += 1
                found[1] += (took[0] - inner[0]) * 1e6
                found[2] += (took[1] - inner[1]) * 1e6

        return clocked

    def taken(self) -> list[float]:
        """Calls, microseconds and those of this thread, of each part since the last time; from now on anew."""
        found = [number for numbers in self._found.values() for number in numbers]
        for numbers in self._found.values():
            numbers[:] = 0.0, 0.0, 0.0
        return found

    def __enter__(self) -> Clocks:
        self._patches = ExitStack()
        for part, functions in PARTS.items():
            for name in functions:
                owner, _, method = name.rpartition("." if "." in name.partition(":")[2] else ":")
                function = pkgutil.resolve_name(name)
                patch = mock.patch.object(pkgutil.resolve_name(owner), method, self.round(part, function))
                self._patches.enter_context(patch)
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()


class Profile(NamedTuple):
    """What a rank has to tell of a step, in microseconds."""

    shares: list[tuple[str, list[float]]]  # contender; in all, this thread on the core, others on it
    parts: list[tuple[str, float, float, float]]  # part, calls, time, time of this thread
    functions: list[tuple[str, float, float]]  # function, calls, own time of this thread


def sampled(case: Case, contender: Contender, steps: int, clocks: Clocks | None = None) -> list[float]:
    """Microseconds of a step: in all, of this thread on the core, of others on it; then those of the clocks.

    The mean over the middle half of the steps: some look at more, some are interrupted.
    """
    samples = []
    for _ in range(steps):
        zero_grad(case)
        start_together()
        before = [clock() for clock in CLOCKS]
        contender.step()
        wall, mine, process = [(clock() - begin) * 1e6 for clock, begin in zip(CLOCKS, before)]
        samples.append([wall, mine, process - mine, *(clocks.taken() if clocks else [])])
    middle = sorted(samples)[len(samples) // 4 : -len(samples) // 4]
    return [statistics.mean(each) for each in zip(*middle)]


def profile(shape: Shape, schedule: str, steps: int, watched: int, count: int) -> Profile:
    """On a rank."""
    case, found = prepared(shape, schedule, contenders(), warm=20)
    shares = [(name, sampled(case, contender, steps)) for name, contender in found.items()]
    with Clocks() as clocks:
        clocked = sampled(case, found["ours"], steps, clocks)[len(CLOCKS) :]
    parts = list(zip(PARTS, clocked[::3], clocked[1::3], clocked[2::3], strict=True))
    profiler = cProfile.Profile(time.thread_time)
    mine = 0.0
    for _ in range(steps):
        zero_grad(case)
        start_together()
        begin = time.thread_time()
        if case.rank == watched:
            profiler.enable()
        found["ours"].step()
        profiler.disable()
        mine += (time.thread_time() - begin) * 1e6
    of_hooks = mine / steps - dict(shares)["ours"][1]
    return Profile(shares, parts, functions(profiler, steps, of_hooks)[:count] if case.rank == watched else [])


def functions(profiler: cProfile.Profile, steps: int, of_hooks: float) -> list[tuple[str, float, float]]:
    """By time of their own, without that of the profiler's hooks: of each call half is the caller's, half its own."""
    found: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    half = of_hooks * steps / sum(calls for _, calls, *_ in found.values()) / 2
    made: Counter[Any] = Counter()
    for *_, callers in found.values():
        made.update({caller: calls for caller, (calls, *_) in callers.items()})
    lines = [
        (_named(*key), calls / steps, (own * 1e6 - (calls + made[key]) * half) / steps)
        for key, (_, calls, own, *_) in found.items()
    ]
    return sorted(lines, key=lambda line: -line[2])


def _named(path: str, line: int, function: str) -> str:
    return function if path == "~" else f"{'/'.join(path.split('/')[-2:])}:{line} {function}"


def report_profile(shape: Shape, schedule: str, steps: int, watched: int, count: int, verbose: bool) -> None:
    """Print both tables for a schedule."""
    with Pair(verbose) as pair:
        ranks: list[Profile] = pair.call(profile, shape, schedule, steps, watched, count, seconds=300)
    print(f"\n{schedule}, {shape}; {steps} steps\n")
    print("| who, without clocks | rank | us a step | this thread | others, gloo's among them | neither: waiting |")
    print("| --- | --- | --- | --- | --- | --- |")
    for lines in zip(*(each.shares for each in ranks)):
        for rank, (name, (wall, mine, others)) in enumerate(lines):
            print(f"| {name} | {rank} | {wall:.0f} | {mine:.0f} | {others:.0f} | {wall - mine - others:.0f} |")
    columns = " | ".join(f"rank {rank}: calls | us a step | thread, us a call | a step" for rank in range(2))
    print(f"\n| part, by its own time | {columns} |")
    print(f"| --- |{' --- |' * 8}")
    for (part, *one), (_, *two) in zip(*(each.parts for each in ranks), strict=True):
        if one[0] or two[0]:
            cells = [f"{calls:.0f} | {us:.0f} | {thread / max(calls, 1e-9):.1f} | {thread:.0f}"
                     for calls, us, thread in (one, two)]  # fmt: skip
            print(f"| {part} | {' | '.join(cells)} |")
    totals = [[sum(part[number] for part in each.parts) for number in (2, 3)] for each in ranks]
    print(f"| all | {' | '.join(f' | {us:.0f} | | {thread:.0f}' for us, thread in totals)} |")
    print(f"\n| function, on rank {watched} | calls a step | own us a call | own us a step |")
    print("| --- | --- | --- | --- |")
    for name, calls, own in ranks[watched].functions:
        print(f"| `{name}` | {calls:.1f} | {own / max(calls, 1e-9):.2f} | {own:.0f} |")
