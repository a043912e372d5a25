"""A process that has imported torch and forks others: each starts in milliseconds, and ends as scripts end.

    Nursery ──an order, and a file descriptor or none──► `serve` in the script ──fork──► main(order): a child
            ◄──pid; later exit code, when───────────────

Each child is a session of its own, writes to a file of its own, and dies with the nursery, which dies with the process
that began it. SIGUSR1 lets a child write down the stacks of its threads. Clocks are time.monotonic(), which all
processes of a machine share.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# One thread; and no name server is asked for the name of each address that torch connects to: some answers come late.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}
POLL = 0.02  # seconds after which an end is seen


class Child:
    """A process that a nursery has forked.

    Attributes:
        pid: its number, and that of its session.
        code: its exit code, negative for a signal; None: it has not ended.
        ended: when, in seconds of time.monotonic().
    """

    def __init__(self, nursery: Nursery, pid: int, files: Path) -> None:
        self.pid = pid
        self.code: int | None = None
        self.ended: float | None = None
        self._nursery, self._files = nursery, files

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, by then."""
        until = time.monotonic() + seconds
        self._nursery.listen(0.0)
        while self.code is None and (left := until - time.monotonic()) > 0:
            self._nursery.listen(left)
        return self.code is not None

    def state(self) -> str:
        """ "running", "stopped", "killed by SIGKILL", "exited with 3"."""
        if self.wait(0.0):
            assert self.code is not None
            return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with {self.code}"
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # the nursery has reaped it, and tells its code next
            assert self.wait(10.0)
            return self.state()
        return "stopped" if letter in "Tt" else "running"

    def stacks(self) -> str:
        """Where its threads are, if it runs."""
        file = self._files.with_suffix(".stacks")
        if self.state() == "running":
            self.signal(signal.SIGUSR1)
            size, until = -1, time.monotonic() + 5
            while size != (size := file.stat().st_size) or (not size and time.monotonic() < until):
                time.sleep(0.1)
        return file.read_text(errors="replace")

    def output(self) -> str:
        """What it has written to its standard output and error."""
        return self._files.with_suffix(".output").read_text(errors="replace")

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and all that it began."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.wait(10)


class Nursery:
    """Forks children from a process that is started when it is first needed.

    Args:
        script: a file that ends with `serve(main)`.
        environment: more variables for the process.
    """

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None) -> None:
        self._script, self._environment = script, {**ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._children: dict[int, Child] = {}

    def fork(self, files: Path, order: Any, *fds: int) -> Child:
        """A child in which `main(order, *fds)` runs.

        Args:
            files: its output goes to this name with .output behind, its stacks to that with .stacks.
            order: what JSON can say.
            fds: file descriptors that it gets.
        """
        self._start()
        for suffix in (".output", ".stacks"):
            files.with_suffix(suffix).touch()
        socket.send_fds(self._channel, [json.dumps([str(files), order]).encode()], fds)
        while (report := self.listen(60.0)) is not None:
            if "code" not in report:
                child = self._children[report["pid"]] = Child(self, report["pid"], files)
                return child
        raise RuntimeError("the nursery does not answer")

    def listen(self, seconds: float) -> dict[str, Any] | None:
        """What it reports next, within that time; an end is noted in the child."""
        if not select.select([self._channel], [], [], seconds)[0]:
            return None
        try:
            data = self._channel.recv(4096)
        except ConnectionResetError:
            data = b""
        if not data:
            raise RuntimeError(f"the nursery {self._script.name} has ended; why is on its standard error")
        report: dict[str, Any] = json.loads(data)
        if "code" in report:
            child = self._children.pop(report["pid"])
            child.code, child.ended = report["code"], report["at"]
        return report

    def stop(self) -> None:
        """End all children, and the nursery."""
        if self._process is None:
            return
        for child in list(self._children.values()):
            child.kill()
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> None:
        if self._process is None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-W", "error", str(self._script), str(theirs.fileno())]
            environment = {**os.environ, **self._environment}
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)
            theirs.close()
            atexit.register(self.stop)


# ---------------------------------------------------------------------------------------------- in the script


def raise_warnings() -> None:
    """From now on warnings are errors, but for that of optimizers which are not torch's: jobs have some."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"\w+\.step is not one of torch\.optim's")


def serve(main: Callable[..., None]) -> None:
    """Fork a child for each order, until the other end closes; in a child, run `main(order, *fds)` and return."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    raise_warnings()  # imports may have set other filters
    gc.collect()
    gc.freeze()  # a child that collected garbage would copy all that torch has made when it was imported
    children = 0
    while True:
        while children and (end := os.waitpid(-1, os.WNOHANG))[0]:
            children -= 1
            _report(channel, pid=end[0], code=os.waitstatus_to_exitcode(end[1]), at=time.monotonic())
        if not select.select([channel], [], [], POLL if children else None)[0]:
            continue
        data, fds, *_ = socket.recv_fds(channel, 1 << 20, 8)
        if not data:
            return channel.close()
        ready, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            channel.close()
            os.close(ready)
            files, order = json.loads(data)
            _become(Path(files))
            os.close(ours)
            return main(order, *fds)
        children += 1
        for fd in (*fds, ours):
            os.close(fd)
        os.read(ready, 1)  # nothing comes: the child, a session by now that can be killed, has closed its end
        os.close(ready)
        _report(channel, pid=pid)


def _report(channel: socket.socket, **report: Any) -> None:
    channel.send(json.dumps(report).encode())


def _become(files: Path) -> None:
    """From the nursery's copy a process of its own."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the nursery, whatever this process waits for then
    output = os.open(files.with_suffix(".output"), os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    stacks = open(files.with_suffix(".stacks"), "a")  # noqa: SIM115 (as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
