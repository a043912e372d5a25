"""Signal handlers that raise on one rank, at any line of a call: has it taken place on all ranks, or on none?

    swept(entry, ...)   -->  of each interrupt: where, what this rank raised, what the call left: all, none, torn

    swept(entry, ...)   -->  per interrupt: where it came, what this rank raised, what is left: all, none, torn
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from one_and_many import in_one_process
from rank_models import even, rows, square
from replica_training import mesh_of
from torch import Tensor, nn

from pipeline import EagerUpdate, Pipe

PLACES = (
    "/pipeline/distributed/", "/pipeline/pipe.py", "/pipeline/execution/engine.py", "/pipeline/entry/forward.py",
    "/pipeline/entry/entry_points.py", "/pipeline/entry/step.py", "/pipeline/entry/sinks.py", "/pipeline/entry/eager",
    "/pipeline/stage/hooks.py", "/pipeline/gradients/eager", "/pipeline/data/loss.py", "/torch/optim/",
)  # fmt: skip
BEFORE, AFTER = "none", "all"


class Outcome(NamedTuple):
    """Of one interrupt, on one rank.

    Attributes:
        where: the line it came at, on the rank that it came to.
        error: what this rank raised, with its notes; "" if nothing.
        left: what every rank's parameters, gradients and buffers are, in the order of the ranks.
        is_torn: whether this rank's EagerUpdate says that the step is torn.
        is_right_then: whether the next step gives what one process gives.
    """

    where: str
    error: str
    left: list[str]
    is_torn: bool
    is_right_then: bool


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).double()


def over_replicas() -> Pipe:
    """Replicas that all get the same rows, so that the mean is what each has."""
    return Pipe(model(), [2, 2], 3, devices=["cpu"] * 2, replicas=mesh_of(dist.get_world_size())["dp"])


class Line:
    """Raises a signal at a line of a call over ranks: at the n-th, or that many after the begin of the vote."""

    def __init__(self, pipe: Pipe, at: int, votes: bool = False) -> None:
        processes = pipe._settings.processes
        ranks = processes.ranks or (processes.replicas and processes.replicas.ranks)
        assert ranks is not None
        self._ranks, self._at, self._votes = ranks, at, votes
        self.count, self.vote = 0, 0
        self.where = ""

    def __enter__(self) -> Line:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in PLACES) or "/tests/" in name:
            return None
        if event != "line" or self.where or not (self.count or self._ranks.is_in_call):
            return self
        self.count += 1
        if frame.f_code.co_name == "agree" and "/communicator.py" in name and not self.vote:
            self.vote = self.count
        if self.count == self._at + (self.vote or sys.maxsize) * self._votes:
            self.where = f"{name.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
            signal.raise_signal(signal.SIGALRM)
        return self


def _alarm(*_: object) -> None:
    raise TimeoutError("the alarm went off")


class Side:
    """A Pipe with what makes it step: over the ranks, or in one process."""

    def __init__(self, entry: str, pipe: Pipe) -> None:
        self.pipe, self._entry = pipe, entry
        self._optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        self.update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1)) if entry == "eager" else None
        for parameter in pipe.parameters() if entry.endswith("hooks") else ():
            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)

    def prepare(self) -> Callable[[], object]:
        """What comes before the call that is interrupted; the call."""
        x, y = rows(6), rows(6, seed=2)
        if self._entry.endswith("backward"):
            loss = square(self.pipe(x), y)
            return loss.backward
        if self._entry == "clip":
            square(self.pipe(x), y).backward()
            return lambda: self.pipe.clip_grad_norm_(0.1)
        if self._entry.endswith("hooks"):
            return lambda: self.pipe.step(x, y, loss_fn=square)
        return lambda: self.pipe.step(x, y, loss_fn=square, optimizer=self.update or self._optimizer)

    def state(self) -> dict[str, Tensor]:
        grads = {f"{name}.grad": each.grad for name, each in self.pipe.named_parameters() if each.grad is not None}
        return {name: each.detach().clone() for name, each in {**self.pipe.state_dict(), **grads}.items()}

    def reset(self, state: dict[str, Tensor]) -> None:
        """Begin anew with these values, without gradients."""
        self.pipe.zero_grad()
        self.pipe.load_state_dict({name: each for name, each in state.items() if not name.endswith(".grad")})
        if self.update is not None:
            self.update.acknowledge_torn_step()


def swept(entry: str, apart: int, spread: int, dense: int) -> list[Outcome]:
    """Interrupt a call on rank `apart`: at lines spread over all of it, and more densely from the vote on."""
    signal.signal(signal.SIGALRM, _alarm)
    try:
        side = Side(entry, over_replicas() if "replica" in entry else Pipe(model(), even(4, dist.get_world_size()), 3))
        twin = Side(entry, in_one_process(model(), [4], 3))
        start = twin.state()
        for _ in range(3):  # the third looks at no more than it must
            call = side.prepare()
            with Line(side.pipe, sys.maxsize) as line:
                call()
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, (line.count, line.vote))
        count, vote = counts[apart]
        at = [(int(count * part / spread) + 1, False) for part in range(spread)]
        at += [(int((count - vote) * part / dense), True) for part in range(dense) if part or vote]
        return [_interrupted(side, twin, start, apart, *place) for place in at]
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _interrupted(side: Side, twin: Side, start: dict[str, Tensor], apart: int, at: int, votes: bool) -> Outcome:
    for each in (side, twin):
        each.reset(start)
    call, there = side.prepare(), twin.prepare()
    states = {BEFORE: twin.state()}
    there()
    states[AFTER] = twin.state()
    error, where = "", ""
    try:
        if dist.get_rank() == apart:
            with Line(side.pipe, at, votes) as line:
                try:
                    call()
                finally:
                    where = line.where
        else:
            call()
    except Exception as raised:
        error = "\n".join([f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", [])])
    with pytest.raises(TimeoutError):
        signal.raise_signal(signal.SIGALRM)  # at once, as ever
    mine = next((name for name, state in states.items() if _is_part(side.state(), state)), "torn")
    left: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(left, mine)
    is_torn = side.update is not None and side.update.is_torn
    for each in (side, twin):
        each.reset(start)
        each.prepare()()
    return Outcome(where, error, left, is_torn, _is_part(side.state(), twin.state()))


def _is_part(here: dict[str, Tensor], whole: dict[str, Tensor]) -> bool:
    """Whether this rank's state is its part of one process's, bit for bit."""
    grads = {name.endswith(".grad") for name in here} == {name.endswith(".grad") for name in whole}
    return grads and all(name in whole and torch.equal(each, whole[name]) for name, each in here.items())
