"""What does a script do under the real torchrun? Run it, and leave no process behind, however it ends.

    torchrun("train.py", ["--steps", "3"], nproc=2)  -->  Ran(code, stdout, stderr)

torchrun puts each rank into a session of its own, so to end a run means to end all descendants. Those that hang are
first sent SIGABRT, at which Python writes the stacks of all threads (PYTHONFAULTHANDLER).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Ran(NamedTuple):
    """How a run ended: exit code of torchrun, what all ranks wrote; code None: it was ended after its time."""

    code: int | None
    stdout: str
    stderr: str


def torchrun(
    script: str | Path,
    args: Sequence[str] = (),
    nproc: int = 2,
    timeout: float = 90.0,
    environment: Mapping[str, str] | None = None,
) -> Ran:
    """Run a script with `nproc` ranks of one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})}
    environment["RES_OPTIONS"] = "timeout:1"  # torch writes to stderr where it gets no names: see nursery.py
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        agent = subprocess.Popen(
            [*command, str(script), *args], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = agent.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(agent)
        stdout.seek(0)
        stderr.seek(0)
        return Ran(code, stdout.read(), stderr.read())


def end(agent: subprocess.Popen[bytes]) -> None:
    """End a process and all that it began: first each may tell where it is."""
    if agent.poll() is not None:
        return
    _signal([agent.pid], signal.SIGSTOP)  # or it would end all others when it sees the first one end
    family = descendants(agent.pid)
    for pid in family:  # one after another: their stacks would be written into one another
        _signal([pid], signal.SIGABRT)
        time.sleep(0.3)
    _signal([*descendants(agent.pid), *family, agent.pid], signal.SIGKILL)
    agent.wait()


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, now."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
