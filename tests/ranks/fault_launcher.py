"""Ranks that may be killed and stopped: who starts them, who ends them, and what did each of them live to tell?

    launcher ──a line of JSON──► nursery (python fault_script.py: has imported torch) ──fork──► rank 0, rank 1, ...
             ◄──pid, exit code──                                                                each appends to its file

There is no agent, as torchrun's ends all others where one ends: rank 0 hosts the store. A rank is a script of its own,
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, in a process group of its own; it ends as scripts end. Clocks are
time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


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
    """Starts ranks from a nursery, which is started when it is first needed. A context: it leaves no process behind."""

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._pending = b""
        self._runs = 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nursery is not None:
            assert self._nursery.stdin is not None and self._nursery.stdout is not None
            self._nursery.stdin.close()
            try:
                self._nursery.wait(10)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()
            self._nursery.stdout.close()
            self._nursery = None
            shutil.rmtree(self._folder)

    def run(self, size: int, job: Mapping[str, Any], seconds: float, resume_after: float | None = None) -> list[Ran]:
        """Run a job on so many ranks until all have ended, or for so many seconds.

        Args:
            size: how many ranks.
            job: what `fault_script.main` gets.
            seconds: those that have not ended by then are killed, with their process groups.
            resume_after: seconds after which a rank that was stopped goes on.
        """
        self._start()
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        self._say({"size": size, "port": _free_port(), "folder": str(folder), "job": job})
        pids: dict[int, int] = {}
        ended: dict[int, tuple[int, float]] = {}
        until = time.monotonic() + seconds
        stopped: dict[int, float] = {}
        while (len(pids) < size or set(ended) < set(pids)) and time.monotonic() < until:
            for told in self._listen(0.05):
                if "rank" in told:
                    pids[told["pid"]] = told["rank"]
                else:
                    ended[told["pid"]] = told["code"], told["at"]
            if resume_after is not None:
                _resume([pid for pid in pids if pid not in ended], stopped, resume_after)
            elif pids and all(pid in ended or _state(pid) in "Tt" for pid in pids):
                break  # only those that the test stopped are left
        left = [pid for pid in pids if pid not in ended]
        stacks = {pids[pid]: _stacks(pid, folder / f"{pids[pid]}.stacks") for pid in left}
        for pid in pids:
            _end(pid)
        self._forget(set(left))
        ranks = sorted((rank, pid) for pid, rank in pids.items())
        return [_ran(rank, folder, ended.get(pid), stacks.get(rank, "")) for rank, pid in ranks]

    def _start(self) -> None:
        if self._nursery is None:
            self._folder = Path(tempfile.mkdtemp(prefix="faults"))
            folders = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
            # torch asks for the name of every address that it connects to; that may take long where nobody answers.
            more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders), "RES_OPTIONS": "timeout:1"}
            command = [sys.executable, "-W", "error", str(HERE / "fault_script.py")]
            self._nursery = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **more}
            )

    def _say(self, order: Mapping[str, Any]) -> None:
        assert self._nursery is not None and self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()

    def _listen(self, seconds: float) -> list[dict[str, Any]]:
        """What the nursery told meanwhile."""
        assert self._nursery is not None and self._nursery.stdout is not None
        if not select.select([self._nursery.stdout], [], [], seconds)[0]:
            return []
        data = os.read(self._nursery.stdout.fileno(), 65536)
        if not data:
            raise RuntimeError("the nursery of the ranks has ended")
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _forget(self, pids: set[int]) -> None:
        """Wait until the nursery has seen the end of these."""
        until = time.monotonic() + 10
        while pids and time.monotonic() < until:
            pids -= {told["pid"] for told in self._listen(0.05) if "code" in told}


def _ran(rank: int, folder: Path, ended: tuple[int, float] | None, stacks: str) -> Ran:
    told = folder / f"{rank}.told"
    lines = told.read_text().splitlines() if told.exists() else []
    code, when = ended or (None, None)
    output = (folder / f"{rank}.output").read_text(errors="replace")
    return Ran(rank, [json.loads(line) for line in lines], code, when, output, stacks)


def _resume(pids: list[int], stopped: dict[int, float], after: float) -> None:
    for pid in pids:
        if _state(pid) in "Tt":
            stopped.setdefault(pid, time.monotonic())
            if time.monotonic() > stopped[pid] + after:
                os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """As ps tells it: R running, S sleeping, T stopped, Z ended, and X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _stacks(pid: int, file: Path) -> str:
    """Where its threads are."""
    if _state(pid) in "TtZX":
        return ""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    return file.read_text(errors="replace") if file.exists() else ""


def _end(pid: int) -> None:
    """End a rank and all that it began."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---------------------------------------------------------------------------------------------- in the nursery


def serve(main: Any) -> None:
    """In the script: fork a rank for each that is asked for, until the launcher goes; in a rank, run `main(job)`."""
    gc.collect()
    gc.freeze()  # a rank that collected garbage would copy all that torch has made when it was imported
    pids: set[int] = set()
    pending = b""
    while True:
        for pid in list(pids):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                pids.discard(pid)
                _tell({"pid": pid, "code": os.waitstatus_to_exitcode(status), "at": time.monotonic()})
        if not select.select([0], [], [], 0.02)[0]:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            for rank in range(order["size"]):
                pid = os.fork()
                if pid == 0:
                    _become(rank, order)
                    return main(order["job"])
                pids.add(pid)
                _tell({"pid": pid, "rank": rank})


def _tell(told: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(told).encode() + b"\n")


def _become(rank: int, order: Mapping[str, Any]) -> None:
    """From the nursery's copy a rank of its own."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the nursery, whatever this process waits for then
    folder = Path(order["folder"])
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stacks", "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(order["size"]), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(order["port"]), TOLD=str(folder / f"{rank}.told"),
    )  # fmt: skip
