"""Ranks that may be killed and stopped, and what each of them lived to tell.

There is no agent, as torchrun's ends all others where one ends: rank 0 hosts the store. A rank is a script of its own,
forked from a nursery (nursery.py), with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; it ends as scripts end, and
appends what it has to tell to a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nursery import POLL, Child, Nursery
from probing import PROBES

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])


@dataclass
class Ran:
    """One rank's end.

    Attributes:
        rank: which one.
        told: what it wrote down, in order: {"what": "raised", "at": seconds, ...}.
        code: its exit code, negative for a signal; None: it had to be ended.
        ended: when, in seconds of time.monotonic(); None: it had to be ended.
        output: what it printed, tracebacks included.
        stacks: where it was, if it had to be ended and was not stopped.
    """

    rank: int
    told: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None
    ended: float | None = None
    output: str = ""
    stacks: str = ""

    def find(self, what: str) -> list[dict[str, Any]]:
        """What it told under this name."""
        return [each for each in self.told if each["what"] == what]


class Launcher:
    """Starts ranks from a nursery. A context: it leaves no process behind."""

    def __init__(self) -> None:
        self._nursery = Nursery(HERE / "fault_script.py", {"PYTHONPATH": PATH})
        self._folder = Path(tempfile.mkdtemp(prefix="faults"))
        self._runs = 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.stop()
        shutil.rmtree(self._folder)

    def run(self, size: int, job: Mapping[str, Any], seconds: float, resume_after: float | None = None) -> list[Ran]:
        """Run a job on so many ranks until all have ended, or for so many seconds.

        Args:
            size: how many ranks.
            job: what `fault_script.run` gets.
            seconds: those that have not ended by then are killed, with their process groups.
            resume_after: seconds after which a rank that was stopped goes on.
        """
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        world[PROBES] = os.environ.get(PROBES, "yes")
        ranks = []
        for rank in range(size):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TOLD": str(folder / f"{rank}.told")}
            ranks.append(self._nursery.fork(folder / str(rank), {"environment": {**world, **mine}, "job": job}))
        until = time.monotonic() + seconds
        stopped: dict[int, float] = {}
        while (open_ := [child for child in ranks if not child.wait(0.0)]) and time.monotonic() < until:
            if resume_after is not None:
                _resume(open_, stopped, resume_after)
            elif all(child.state() == "stopped" for child in open_):
                break  # only those that the test stopped are left
            open_[0].wait(POLL)
        found = [_ran(rank, child, folder) for rank, child in enumerate(ranks)]
        for child in ranks:
            child.kill()
        return found


def _ran(rank: int, child: Child, folder: Path) -> Ran:
    file = folder / f"{rank}.told"
    lines = file.read_text().splitlines() if file.exists() else []
    told = [json.loads(line) for line in lines]
    return Ran(rank, told, child.code, child.ended, child.output(), child.stacks())


def _resume(children: list[Child], stopped: dict[int, float], after: float) -> None:
    for child in children:
        if child.state() == "stopped":
            stopped.setdefault(child.pid, time.monotonic())
            if time.monotonic() > stopped[child.pid] + after:
                child.signal(signal.SIGCONT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
