"""The communicator of a call over ranks.

    open     digests of the call, the settings and the mini-batch, and rank 0's seed        all to all
    phases   messages in the order of the P2PPlan                                           distributed/mailbox.py
    agree    the loss, its divisor: the step has happened on all ranks or on none           all to all

Where any rank has tensor hooks, they run between two votes: whether the run succeeded, and whether the hooks did. A
failure of an optimizer cannot be voted on beforehand: a barrier after its step reports it in the same call.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor

from pipeline.common.interrupts import Deferral
from pipeline.distributed.assignment import TiedParameter
from pipeline.distributed.comparison import Comparison
from pipeline.distributed.exchange import CallMessages, RankExchange, read_number, written_number
from pipeline.distributed.tied import TiedGradients
from pipeline.distributed.topology import PipeTopology
from pipeline.execution.communicator import CommonTensors, Communicator, Describe, Verdict
from pipeline.recompute.randomness import draw_seed
from pipeline.transports.message import Message
from scheduler import Action

_AGREED = (
    ", after all ranks had agreed that it took place: gradients, parameters and buffers may be changed on some ranks "
    "and not on others. Load a checkpoint before the next step"
)
_VOTED = (
    "had told the others that all went well, and did not hear from all of them: the step may have taken place on some "
    "ranks and not on others. Load a checkpoint before the next step"
)


class DistributedCommunicator(Communicator):
    """One call, over the ranks. It is made right before it is entered.

    Args:
        topology: the topology.
        tied: this rank's copies of tied parameters.
        entry: the entry point that is called: "step".
        forward_call: the call whose backward this is, described equally on all ranks.
        series: of that call; the key of its cached message specs.
    """

    is_alone = False

    def __init__(
        self,
        topology: PipeTopology,
        tied: Mapping[TiedParameter, Tensor],
        entry: str,
        forward_call: str | None = None,
        series: str = "",
    ) -> None:
        self._ranks = ranks = topology.ranks
        self._entry = entry if forward_call is None else f"{entry} of {forward_call}"
        self._is_backward = forward_call is not None
        self._name = ranks.next_call
        self._call = f"{self._entry} (call {ranks.calls + 1} of the script)"
        self._comparison = Comparison(topology, f"{self._entry} of {topology.name}, {self._name}")
        self._messages = CallMessages(ranks, series)
        self._interrupts = Deferral()  # from the last vote to the end
        self._progress = ""  # the progress of the step, for errors
        self.topology: PipeTopology = topology
        self.exchange = RankExchange(topology, self._messages, self._interrupts)
        self.gradients: TiedGradients = TiedGradients(topology.assignment, tied, self._messages)

    # ------------------------------------------------------------------------------------------------ begin and end

    def __enter__(self) -> DistributedCommunicator:
        self._ranks.enter(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.begin()
        try:
            if error is None:
                self._ranks.leave()
            else:
                self._ranks.fail(error, self._call, self._progress)
        finally:
            self._interrupts.end_with_call(self._entry, error, self._is_backward)

    def open(self, words: Describe, draws: bool = True, tensors: CommonTensors = CommonTensors()) -> int:
        """Compare the calls of all ranks. Validating calls compare all values of the mini-batch."""
        kind, _, _ = self._entry.partition(" of ")  # each counts by itself, backwards too
        values = self.topology.opened.next((kind, self._ranks.generation))
        state = torch.get_rng_state()
        try:
            seed, options_digest = self._comparison.open(words, draw_seed() if draws else 0, tensors, values)
        except BaseException:
            torch.set_rng_state(state)  # a rank that failed before has drawn nothing
            raise
        if values:
            self.gradients.check_copies()
        self._messages.series = self._messages.series or f"{self.topology.name}/{self._entry}/{options_digest}"
        return seed

    def compare(self) -> None:
        values = self._comparison.values()
        if values != [0]:
            self._comparison.compare(self._ranks.exchange(values))

    def again(self, entry: str = "backward") -> DistributedCommunicator:
        """The backward of this call. Messages of another entry are others."""
        series = f"{self._messages.series}/{entry}"
        return DistributedCommunicator(self.topology, self.gradients.copies, entry, self._name, series)

    def at(self, action: Action | None) -> None:
        self._ranks.at(action)

    # ------------------------------------------------------------------------------------------------------ together

    def agree(self, verdict: Verdict) -> Verdict:
        """Wait for all ranks, and merge their verdicts.

        A rank that has voted yes takes part in any case: interrupts wait until the call has ended, or until a later
        vote follows.
        """
        self._messages.finish()
        self._interrupts.begin()
        is_step = self._entry == "step"
        self._progress = _VOTED if is_step else ""
        loss, divisor, reached, hooks, metrics = verdict
        own_metrics = {name: written_number(metric) for name, metric in metrics.items()}
        own_loss, own_divisor = [None if number is None else written_number(number) for number in (loss, divisor)]
        values = [reached, hooks, own_loss, own_divisor, own_metrics]
        rows = self._ranks.exchange_alike("ends a call", [*values, *self._comparison.values()])
        self._comparison.compare([row[len(values) :] for row in rows])
        reached, hooks = any(row[0] for row in rows), any(row[1] for row in rows)
        if is_step and reached and not hooks:
            self._call += _AGREED
            self._progress = f"was in {self._call}"
        if hooks:
            self._progress = ""
            self._interrupts.end()
        _, _, last_loss, last_divisor, last_metrics, *_ = rows[self.topology.assignment.last]
        device = self._ranks.device
        numbers = last_loss, last_divisor
        loss, divisor = [None if number is None else read_number(number, device) for number in numbers]
        metrics = {name: read_number(metric, device) for name, metric in last_metrics.items()}
        return Verdict(loss, divisor, reached, hooks, metrics)

    def close(self) -> None:
        self._ranks.exchange_alike("has made its step", None)

    def share_divisor(self, divisor: Tensor | None) -> Tensor | None:
        """The divisor from the last rank, which does not wait until the others have it.

        A rank needs it before it updates its own parameters: from then on interrupts wait.
        """
        self.compare()
        self._interrupts.begin()
        last = self.topology.assignment.last
        message = Message((divisor,)) if self._ranks.rank == last else None
        return self._messages.broadcast(last, "the divisor", message, waits=False).tensors[0]
