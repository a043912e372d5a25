"""The communicator of a call of one replica of a pipeline.

    DataParallelCommunicator ── the pipeline's own communicator, with its parts     enter, open, agree, close, leave
               └─ the replicas' ranks: enter, an averager, vote, leave              once a backward pass

    whole gradients, divisor ─► means ─► all replicas have them ─► verdict: all ranks do ─► .grad, store, optimizer

A call is entered with both. A failure of either is passed on to the other, so in the end every rank of every pipeline
fails the call: a rank that waits, waits for one that fails or that waits itself, and each has someone to tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn

from torch import Tensor

from pipeline.common.interrupts import Deferral
from pipeline.distributed.data_parallel.averager import ReplicaAverager
from pipeline.distributed.data_parallel.gradient_means import ReplicaLostError, among_replicas
from pipeline.distributed.data_parallel.replicas import Replicas
from pipeline.distributed.data_parallel.shards import BucketLayout
from pipeline.distributed.failure.errors import Failure, RankError
from pipeline.distributed.group import GRACE, RankGroup
from pipeline.execution.communicator import CommonTensors, Communicator, Describe, Verdict
from scheduler import Action

_WHERE = ("replica ", "the replicas ")
_AGREED = (
    ", after all replicas had agreed that it took place: parameters and buffers may be changed in some and not in "
    "others. Load a checkpoint before the next step"
)


class DataParallelCommunicator(Communicator):
    """One call of a pipeline that has replicas. It is made right before it is entered.

    Args:
        inner: the communicator of the pipeline's own processes, whose parts this one has.
        replicas: the replicas.
        layout: what travels between them.
        entry: what is called: "step".
        forward_descriptions: the call whose backward this is: what the replicas must agree on.
    """

    is_alone = False

    def __init__(
        self,
        inner: Communicator,
        replicas: Replicas,
        layout: BucketLayout,
        entry: str,
        forward_descriptions: Mapping[str, str] | None = None,
    ) -> None:
        ranks = replicas.ranks
        self._inner = inner
        self._replicas = replicas
        self._entry = entry
        self._is_backward = forward_descriptions is not None
        self._name = f"{entry} (call {ranks.calls + 1} among the replicas)"
        self._interrupts = Deferral()  # from the last vote to the end
        calls = f"{entry} of Pipe {replicas.number}, {ranks.next_call}"
        if forward_descriptions is not None:
            calls += f", of {forward_descriptions['the calls']}"
        self.averager: ReplicaAverager = ReplicaAverager(replicas, layout, calls, forward_descriptions)
        self.topology, self.exchange, self.gradients = inner.topology, inner.exchange, inner.gradients

    # ------------------------------------------------------------------------------------------------ begin and end

    def __enter__(self) -> DataParallelCommunicator:
        ranks = self._replicas.ranks
        ranks.refuse_within_call(self._name)
        self._inner.__enter__()
        try:
            ranks.enter(self._name)
        except BaseException as error:
            self._inner.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.begin()
        try:
            if error is None:
                self._inner.__exit__(None, None, None)
                self._replicas.ranks.leave()
            elif self._replicas.pipeline is None:
                self._replicas.ranks.fail(error, self._call)
            else:
                self._fail(error, self._replicas.pipeline)
        finally:
            self._interrupts.end_with_call(self._entry, error, self._is_backward)

    @property
    def _call(self) -> str:
        """The call, in words, and whether it has taken place."""
        return self._name + (_AGREED if self.averager.is_agreed else "")

    def _fail(self, error: BaseException, pipeline: RankGroup) -> NoReturn:
        """The call failed here: make it everyone's failure, first the pipeline's, then the replicas'."""
        ranks = self._replicas.ranks
        if isinstance(error, ReplicaLostError):
            failure = ranks.monitor.verdict(GRACE) or ranks.lost(error, self._call)
            location = f"{_WHERE[1]}(ranks {ranks.members} of the world, here 0 to {ranks.size - 1})"
            pipeline.monitor.fail(_located(failure, location))
        try:
            self._inner.__exit__(type(error), error, error.__traceback__)
        finally:
            self._pass_on()
        raise error

    def _pass_on(self) -> None:
        """Make the pipeline's failure that of the replicas."""
        ranks, pipeline = self._replicas.ranks, self._replicas.pipeline
        assert pipeline is not None  # or nothing failed but here
        failure = pipeline.monitor.verdict(0.0)
        assert failure is not None  # the pipeline's call has failed
        location = f"{_WHERE[0]}{ranks.rank} (ranks {pipeline.members} of the world, here 0 to {pipeline.size - 1})"
        ranks.monitor.fail(_located(failure, location))
        ranks.connections.close()
        ranks.monitor.leave()

    def open(self, words: Describe, draws: bool = True, tensors: CommonTensors = CommonTensors()) -> int:
        """As the pipeline's own. What replicas must agree on is compared when their gradients meet."""
        place = {"the replicas": f"number {self._replicas.ranks.rank} of {self._replicas.ranks.size}"}
        seed = self._inner.open(lambda values: {**words(values), **place}, draws, tensors)
        self.averager.describe(words(False))
        return seed

    def at(self, action: Action | None) -> None:
        self._replicas.ranks.at(action)
        self._inner.at(action)

    def again(self, entry: str = "backward") -> DataParallelCommunicator:
        """The backward of this call."""
        inner, averager = self._inner.again(entry), self.averager
        return DataParallelCommunicator(inner, self._replicas, averager.layout, entry, averager.descriptions)

    # ------------------------------------------------------------------------------------------------------ together

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        self._interrupts.begin()
        return self._inner.share_divisor(divisor)

    def compare(self) -> None:
        self._inner.compare()

    def agree(self, verdict: Verdict) -> Verdict:
        """Vote among the processes with the same stages, then in the pipeline: so all replicas have come this far.

        Where a replica has hooks, which may still refuse the step, all wait for them.
        """
        self._interrupts.begin()
        votes = self.averager.waits_for_vote
        if votes:
            self.compare()  # what refuses one replica's call refuses all
            self._replicas.ranks.monitor.at = "the vote of all replicas"
            with among_replicas():
                rows = self._replicas.ranks.exchange([self._replicas.number, verdict.hooks])
            verdict = verdict._replace(hooks=any(hooks for _, hooks in rows))
        verdict = self._inner.agree(verdict)
        if verdict.hooks:
            self._interrupts.end()
        elif votes and not self._is_backward:
            self.averager.is_agreed = True
        return verdict

    def close(self) -> None:
        self._inner.close()
        with among_replicas():
            self._replicas.ranks.exchange([self._replicas.number])


def _located(failure: Failure, location: str) -> Failure:
    """The failure, with the place where it arose, once: for ranks that are numbered otherwise."""
    if failure.call.startswith(_WHERE):
        return failure
    is_silence = failure.type_name.endswith(f".{RankError.__name__}")
    message = f"{location}: {failure.message}" if is_silence else failure.message
    return failure._replace(call=f"{location}, {failure.call}", message=message)
