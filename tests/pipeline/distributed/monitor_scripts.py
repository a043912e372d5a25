"""Ranks as processes that do what a test tells them, and may be stopped and killed.

    test ──"fork"──► nursery (has imported torch) ──fork──► rank ──connects──► test:  ["enter", 0, "step 7"] ──► answer

A rank is a script of its own, and ends as scripts do, with its exit handlers. `python monitor_scripts.py` is the
nursery.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.distributed.failure.errors import RankError, exception_of, of_exception
from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.failure.store_watchdog import watch
from scheduler.action import Action

PATIENCE = 30.0  # seconds for anything that a test waits for


class StrangeError(Exception):
    """Of this module: each rank has it under the name __main__.StrangeError."""


# ------------------------------------------------------------------------------------------------- a rank's process


class Rank:
    """What a rank can be told to do. Each method is a command."""

    def start(self, rank: int, size: int, store: list[Any], heartbeat: float, timeout: float) -> int:
        self.rank, self.size = rank, size
        self.threads = _threads()
        self.store = _store(*store)
        self.groups: dict[int, dist.ProcessGroupGloo] = {}
        self.aborts = 0
        self.monitor = FailureMonitor(heartbeat)
        watch(self.monitor, self.store, "watch", rank, size, timeout)
        self.process = os.getpid()
        atexit.register(self.end)
        return self.process

    def end(self) -> None:
        """As at the end of a script, and not in a fork of it."""
        if os.getpid() == self.process:
            self.monitor.farewell()

    def connect(self, generation: int) -> None:
        """A group of two for each other rank."""
        for other in set(range(self.size)) - {self.rank}:
            low, high = sorted((self.rank, other))
            store = dist.PrefixStore(f"{generation}/{low}-{high}", self.store)
            self.groups[other] = dist.ProcessGroupGloo(store, int(self.rank == high), 2, timedelta(seconds=60))

    def enter(self, generation: int, call: str) -> None:
        self.call = call
        self.monitor.enter(generation, call, self.abort)

    def abort(self) -> None:
        """Wakes every wait: gloo's waits end when one on the same pair of ranks runs out of time."""
        self.aborts += 1
        for other, group in self.groups.items():
            try:
                peer = int(self.rank < other)
                group.recv([torch.empty(1)], peer, 999).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass

    def at(self, text: Any) -> None:
        self.monitor.at = tuple(text) if isinstance(text, list) else text

    def receive(self, source: int) -> Any:
        """A number; or, if the wait died, the failure that this rank raises."""
        found = torch.zeros(1)
        try:
            self.groups[source].recv([found], int(self.rank < source), 0).wait()
        except RuntimeError as error:
            return self.learn(source, error)
        self.monitor.steps += 1
        return found.item()

    def learn(self, source: int, error: Exception) -> Any:
        found = self.monitor.verdict(0.5)
        if found is None:
            closed = RankError(f"the connection to rank {source} was closed")
            closed.__cause__ = error
            self.monitor.fail(of_exception(closed, self.rank, self.call))
            found = self.monitor.verdict(0.5)
        return found._asdict() | {"aborts": self.aborts}

    def send(self, to: int, number: float) -> None:
        self.sent = self.groups[to].send([torch.tensor([number])], int(self.rank < to), 0)  # held, or it is not sent
        self.monitor.steps += 1

    def fail(self, message: str) -> None:
        try:
            raise StrangeError(message)
        except StrangeError as error:
            self.monitor.fail(of_exception(error, self.rank, self.call, Action.parse("2F3")))

    def verdict(self, grace: float) -> Any:
        found = self.monitor.verdict(grace)
        return None if found is None else found._asdict() | {"aborts": self.aborts}

    def raised(self) -> list[Any]:
        """What this rank raises for the failure: type, words, notes."""
        error = exception_of(self.monitor.verdict(0.0), self.rank)
        return [type(error).__name__, str(error), error.__notes__]

    def fork(self) -> int:
        """How a child ends that runs the exit handlers. (Its gloo has no threads: it may not take down the groups.)"""
        is_held = threading.Event()
        is_over = threading.Event()

        def hold() -> None:
            with self.monitor.changed:
                is_held.set()
                is_over.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        warnings.simplefilter("ignore")  # Python's, of a fork where there are threads
        process = os.fork()  # a lock that is held now is held for ever in the child
        if process == 0:
            signal.alarm(10)
            atexit._run_exitfuncs()
            os._exit(0)
        is_over.set()
        return os.waitpid(process, 0)[1]

    def steps(self, seconds: float) -> None:
        """Get on, for so long, without other ranks."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.monitor.steps += 1
            time.sleep(0.02)

    def hold(self, seconds: float) -> None:
        """Hold Python's lock: nothing else in this process runs."""
        switch = sys.getswitchinterval()
        sys.setswitchinterval(1e6)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        sys.setswitchinterval(switch)

    def leave(self) -> None:
        self.monitor.leave()

    def farewell(self) -> None:
        self.monitor.farewell()

    def stop(self) -> list[str]:
        """The threads that are left of it."""
        self.monitor.stop()
        self.monitor.stop()
        return self.left()

    def left(self) -> list[str]:
        return sorted(set(_threads()) - set(self.threads))

    def crash(self) -> None:
        raise SystemExit(3)


def _threads() -> list[str]:
    return [f"{thread.name} {thread.ident}" for thread in threading.enumerate()]


def _store(kind: str, where: Any, is_host: bool) -> dist.Store:
    if kind == "file":
        return dist.FileStore(where, -1)
    return dist.TCPStore("127.0.0.1", where, None, is_host, wait_for_workers=False)


def _obey(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(1)
    global rank  # as of a script: it lives until the end
    rank = Rank()
    with Client(address) as connection:
        while True:
            name, *settings = json.loads(connection.recv_bytes())
            if name == "exit":
                return
            value = getattr(rank, name)(*settings)
            connection.send_bytes(json.dumps([value, time.monotonic()]).encode())


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            return _obey(line.strip())


# ---------------------------------------------------------------------------------------------------- a test's side


class Remote:
    """A rank, as a test sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.process = 0

    def post(self, *command: Any) -> float:
        """Tell it to do something; return when that was."""
        self.connection.send_bytes(json.dumps(command).encode())
        return time.monotonic()

    def answer(self, within: float = PATIENCE) -> tuple[Any, float]:
        """What came of it, and when."""
        assert self.connection.poll(within), f"no answer within {within} s"
        value, when = json.loads(self.connection.recv_bytes())
        return value, when

    def do(self, *command: Any) -> Any:
        """What comes of it."""
        self.post(*command)
        return self.answer()[0]

    def is_silent(self, seconds: float) -> bool:
        """Whether it gives no answer for so long."""
        return not self.connection.poll(seconds)

    def kill(self, number: int) -> float:
        """Send it a signal; return when that was."""
        os.kill(self.process, number)
        return time.monotonic()

    def has_ended(self, within: float = PATIENCE) -> bool:
        """Whether its process is gone by then."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            try:
                os.kill(self.process, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.02)
        return False


class Nursery:
    """Makes processes of ranks, quickly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Remote] = []
        self.count = 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["RES_OPTIONS"] = "timeout:1"  # torch writes to stderr where it gets no names: see nursery.py
        command = [sys.executable, "-W", "error", __file__]
        self.errors = open(folder / "stderr", "w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self.errors, text=True, env=environment)

    def remote(self) -> Remote:
        self.count += 1
        address = str(self.folder / f"rank{self.count}")
        with Listener(address) as listener:
            assert self.process.stdin is not None
            self.process.stdin.write(address + "\n")
            self.process.stdin.flush()
            found = Remote(listener.accept())
        self.made.append(found)
        return found

    def ranks(self, size: int, store: tuple[str, Any], heartbeat: float, timeout: float) -> list[Remote]:
        """Ranks that are each watched by the others, and have groups for generation 0."""
        remotes = [self.remote() for _ in range(size)]
        kind, where = store
        for rank, remote in enumerate(remotes):
            is_host = kind == "rank 0" and rank == 0
            remote.process = remote.do("start", rank, size, [kind, where, is_host], heartbeat, timeout)
        every(remotes, "connect", 0)
        return remotes

    def written(self) -> str:
        """What ranks have written to their standard error since this was asked last."""
        text = (self.folder / "stderr").read_text()
        self.errors.truncate(0)
        return text

    def clear(self) -> None:
        """End the ranks that are left."""
        for remote in self.made:
            if remote.process and not remote.has_ended(0.01):
                remote.kill(signal.SIGKILL)
            remote.connection.close()
        self.made.clear()


def every(remotes: list[Remote], *command: Any) -> list[Any]:
    """What comes of it on each."""
    for remote in remotes:
        remote.post(*command)
    return [remote.answer()[0] for remote in remotes]


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    """One, until the end."""
    found = Nursery(folder)
    try:
        yield found
    finally:
        found.clear()
        assert found.process.stdin is not None
        found.process.stdin.close()
        found.process.wait(PATIENCE)
        found.errors.close()


if __name__ == "__main__":
    _serve()
