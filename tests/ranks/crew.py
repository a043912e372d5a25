"""How do tests run on several ranks without paying for new processes each time?

    crew = Crew(3)                                       no process yet
    crew.run("jobs:double", 4)   -->  [8, 8, 8]          one function call on each rank, results in order of ranks
    crew.outcomes("jobs:fail")   -->  [Raised, ...]      exceptions as data
    a hang, a dead rank          -->  CrewFailed: every rank's state, exception or stacks, and output

The processes live until `stop`; after a hang, a death or a thread left behind they are replaced at the next job. They
are forked from nurseries, which all crews share. There is one for even ranks and one for odd ones: Python orders the
words of a set in another way in each of the two, as in the processes of a torchrun. Each job has a store of its own,
held by this process as torchrun's agent holds it, so no job sees another one's keys.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe as connections
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from crew_worker import CLEAN, Job, Raised, Returned
from nursery import Nursery
from probing import PROBES
from torch.distributed import TCPStore

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent / "pipeline"), os.environ.get("PYTHONPATH", "")])
NURSERIES = [Nursery(HERE / "crew_nursery.py", {"PYTHONPATH": PATH}) for _ in range(2)]  # for even ranks, for odd ones


@dataclass(frozen=True)
class Lost:
    """A rank that did not answer: how it was found ("running", "stopped", "killed by SIGKILL"), and its stacks."""

    rank: int
    state: str
    stacks: str

    def __str__(self) -> str:
        return f"rank {self.rank} gave no answer: {self.state}"


Outcome = Returned | Raised | Lost


class CrewFailed(AssertionError):
    """A job did not go as it should: a rank raised, died, or never answered."""


class Rank:
    """One process and its connection."""

    def __init__(self, rank: int, size: int, folder: Path, nurseries: Sequence[Nursery]) -> None:
        self.rank = rank
        self.connection, theirs = connections()
        self.process = nurseries[rank % len(nurseries)].fork(folder / str(rank), [rank, size], theirs.fileno())
        theirs.close()

    def receive(self) -> Any:
        """The next message. EOFError: the process is gone."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except ConnectionResetError:
            raise EOFError from None

    def send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except BrokenPipeError:
            pass  # receive() will say so

    def lost(self) -> Lost:
        """Why there is no answer, with the stacks of all threads where there are any."""
        self.process.wait(0.2)  # its connection closes a little earlier than it is dead
        return Lost(self.rank, self.process.state(), self.process.stacks())

    def output(self) -> str:
        return self.process.output()[-4000:]

    def kill(self) -> None:
        self.process.kill()
        self.connection.close()


class Crew:
    """`size` processes that run the same function, each as one rank of a torchrun.

    Args:
        size: how many ranks.
        grace: seconds that the others have left to answer once a rank has raised or died.
        nurseries: fork the processes.
    """

    def __init__(self, size: int, grace: float = 30.0, nurseries: Sequence[Nursery] = NURSERIES) -> None:
        self.size = size
        self.grace = grace
        self._nurseries = nurseries
        self._ranks: list[Rank] = []
        self._folder = Path()

    def run(self, function: str, *args: Any, timeout: float = 60.0, **how: Any) -> list[Any]:
        """Each rank's result, in order of ranks; `how` as for `outcomes`.

        Raises:
            CrewFailed: a rank raised, died or did not answer in `timeout` seconds.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, **how)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            raise CrewFailed(self._told(function, outcomes))
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def outcomes(
        self,
        function: str,
        *args: Any,
        timeout: float = 60.0,
        environment: Mapping[str, str] | None = None,
        init: bool = True,
        lost: Collection[int] = (),
        agent: bool = True,
    ) -> list[Outcome]:
        """What became of each rank.

        Args:
            function: "module:function", called with `args` on every rank.
            timeout: seconds for all ranks to answer.
            environment: more variables for this job.
            init: initialise torch.distributed with gloo. False: the function does that, or Pipe.
            lost: ranks that need not answer, since the job kills or stops them.
            agent: the store is this process's. False: rank 0's, as where no torchrun is.

        Raises:
            CrewFailed: another rank than those of `lost` died or did not answer, or something raised where nobody
                could catch it.
        """
        self._ensure()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agent else None
        port = store.port if store else _free_port()
        probes = os.environ.get(PROBES, "yes")
        known = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(agent), PROBES: probes}
        job = pickle.dumps(Job(function, args, {**known, **(environment or {})}, init))
        for rank in self._ranks:
            rank.send(job)
        try:
            outcomes = self._collect(timeout, set(lost))
            bad = {rank for rank, outcome in outcomes.items() if isinstance(outcome, Lost)}
            found = [outcomes[rank] for rank in range(self.size)]
            if bad - set(lost):
                raise CrewFailed(self._told(function, found))
            if bad:
                self.stop()
            else:
                self._clean(function)
        except BaseException:
            self.stop()
            raise
        return found

    def stop(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.kill()
        if self._ranks:
            shutil.rmtree(self._folder)
        self._ranks = []

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    # ------------------------------------------------------------------------------------------------------- inside

    def _ensure(self) -> None:
        if self._ranks and all(rank.process.state() == "running" for rank in self._ranks):
            return
        self.stop()
        self._folder = Path(tempfile.mkdtemp(prefix="crew"))
        try:
            for rank in range(self.size):
                self._ranks.append(Rank(rank, self.size, self._folder, self._nurseries))
            for each in self._ranks:
                if not each.connection.poll(120) or each.connection.recv_bytes() != b"ready":
                    raise CrewFailed(f"rank {each.rank} did not start:\n{each.output()}")
        except BaseException as error:
            outputs = "".join(each.output() for each in self._ranks)
            self.stop()
            if isinstance(error, EOFError):
                raise CrewFailed(f"a rank did not start:\n{outputs}") from None
            raise

    def _collect(self, timeout: float, lost: set[int]) -> dict[int, Outcome]:
        """Answers as they come; those without one are `Lost`."""
        outcomes: dict[int, Outcome] = {}
        until = time.monotonic() + timeout
        while set(range(self.size)) - lost - set(outcomes) and (left := until - time.monotonic()) > 0:
            open_ = {rank.connection: rank for rank in self._ranks if rank.rank not in outcomes}
            for ready in wait(list(open_), left):
                assert isinstance(ready, Connection)
                rank = open_[ready]
                try:
                    outcomes[rank.rank] = rank.receive()
                except EOFError:
                    outcomes[rank.rank] = rank.lost()
                if not isinstance(outcomes[rank.rank], Returned) and rank.rank not in lost:
                    until = min(until, time.monotonic() + self.grace)
        silent = [rank for rank in self._ranks if rank.rank not in outcomes]
        return {**outcomes, **{rank.rank: rank.lost() for rank in silent}}

    def _clean(self, function: str) -> None:
        for rank in self._ranks:
            rank.send(CLEAN)
        threads: list[str] = []
        for rank in self._ranks:
            try:
                if not rank.connection.poll(30):
                    raise CrewFailed(f"{rank.lost()} after the job {function}, at the end of its group")
                asides, left = rank.receive()
            except EOFError:
                raise CrewFailed(f"{rank.lost()} after the job {function}:\n{rank.output()}") from None
            if asides:
                raise CrewFailed(f"job {function}: rank {rank.rank} raised where nobody could catch it:\n{asides[0]}")
            threads += left
        if threads:
            self.stop()

    def _told(self, function: str, outcomes: list[Outcome]) -> str:
        """All that is known, the short of it first."""
        outputs = {rank.rank: rank.output() for rank in self._ranks}
        lines = [f"job {function} on {self.size} ranks failed"]
        lines += [f"rank {each.rank} returned" if isinstance(each, Returned) else str(each) for each in outcomes]
        for each in outcomes:
            if isinstance(each, Raised):
                lines += [f"---- rank {each.rank}", each.traceback]
            if isinstance(each, Lost):
                lines += [f"---- rank {each.rank}, its stacks", each.stacks]
            if outputs.get(each.rank):
                lines += [f"---- rank {each.rank} wrote", outputs[each.rank]]
        return "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
