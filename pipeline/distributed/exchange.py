"""The exchanges between the ranks of a call beside its phases: the output, norms, sums, states, events.

    CallMessages    messages by themselves: from one rank to another; over the tree from one to all, from all to rank 0
    RankExchange    broadcast, gather: by CallMessages
                    rows, sum_over, norms, events: a few values from all to all, by RankGroup.exchange
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partition.names import by_place
from pipeline.common.interrupts import Deferral
from pipeline.common.places import Place
from pipeline.data.pytrees import flatten
from pipeline.data.values import Values
from pipeline.distributed.group import RankGroup
from pipeline.distributed.mailbox import RankMailbox
from pipeline.distributed.topology import PipeTopology
from pipeline.execution.communicator import Exchange
from pipeline.execution.mailbox import Mailbox
from pipeline.execution.trace import Span, clock_name
from pipeline.gradients.clip import joined_norm, norm_of, norms_as_numbers
from pipeline.transports.local import Local
from pipeline.transports.message import Message
from scheduler import Action, Event
from scheduler.clocks import ahead_of_first, on_one_clock


class CallMessages:
    """The messages of a call that go by themselves, each under a name.

    Args:
        ranks: the ranks, and the links between them.
        series: what the messages of all such calls have in common; the key of their cached specs.
    """

    def __init__(self, ranks: RankGroup, series: str) -> None:
        self.ranks = ranks
        self.series = series
        self._unfinished: list[int] = []  # ranks that have a message on its way

    def send(self, ranks: Iterable[int], name: str, message: Message, waits: bool = True) -> None:
        """Send a message. `waits`: until all have received it; else `finish` does."""
        self.finish()
        targets = list(ranks)
        for rank in targets:
            sender = self.ranks.connections.sender(rank)
            sender.begin(f"{self.series}/{name}", [name])
            sender.send(name, message)
        self._unfinished = targets
        if waits:
            self.finish()

    def receive(self, source: int, name: str) -> Message:
        """Wait for a message."""
        self.ranks.monitor.at = f"the end, for {name} from rank {source}"
        receiver = self.ranks.connections.receiver(source)
        receiver.begin(f"{self.series}/{name}", [name])
        message = receiver.receive(name)
        receiver.finish()
        return message

    def broadcast(self, source: int, name: str, message: Message | None, waits: bool = True) -> Message:
        """A message from one rank, on all, passed on over the tree. `message`: on that rank; else None.

        No rank waits until others have it, unless `waits`: then until its own neighbours have.
        """
        place = self.ranks.place
        neighbour = place.towards(source)
        if neighbour is not None:
            message = self.receive(neighbour, name)
        assert message is not None  # the source gives it
        self.send([rank for rank in place.neighbours if rank != neighbour], name, message, waits)
        return message

    def gather(self, name: str, message: Message) -> list[Message]:
        """The messages of all ranks, on rank 0, by rank; on others nothing.

        They come over the tree, one after the other: no rank but 0 holds more than one of another.
        """
        place, messages = self.ranks.place, list[Message]()
        for rank in place.ranks:
            message_name, neighbour = f"{name} of rank {rank}", place.towards(rank)
            rank_message = message if neighbour is None else self.receive(neighbour, message_name)
            if place.parent is None:
                messages.append(rank_message)
            else:
                self.send([place.parent], message_name, rank_message)
        return messages

    def finish(self) -> None:
        """Wait until the others have received all that was sent."""
        while self._unfinished:
            self.ranks.finish(self._unfinished.pop(0))


class RankExchange(Exchange):
    """The exchange of values between the ranks.

    Args:
        topology: the topology.
        messages: those of the call.
        interrupts: of the call: once all ranks know a norm, all scale their gradients or none does.
    """

    def __init__(self, topology: PipeTopology, messages: CallMessages, interrupts: Deferral) -> None:
        self._topology = topology
        self._ranks = topology.ranks
        self._messages = messages
        self._interrupts = interrupts

    def mailbox(self, values: Values, places: Mapping[int, Place], transport: Local) -> Mailbox:
        return RankMailbox(values, self._topology.assignment.rank_of, self._ranks, self._messages.series, transport)

    def broadcast(self, name: str, stage: int, message: Message | None) -> Message:
        return self._messages.broadcast(self._topology.assignment.rank_of[stage], name, message)

    def gather(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        tree = flatten(dict(named), f"the state of rank {self._ranks.rank}")
        tensors = tuple([tensor.detach() for tensor in tree.tensors])
        messages = self._messages.gather("the state", Message(tensors, tree.skeleton))
        if self._ranks.rank != 0:
            return None
        whole = dict(named)
        for message in messages[1:]:
            whole.update(message.tree.build(message.tree.tensors))
        return whole

    def rows(self, value: Any) -> list[Any]:
        return self._ranks.exchange_alike("tells the others a value", value)

    def sum_over(self, numbers: Tensor) -> Tensor:
        values = numbers.reshape(-1).tolist()
        total = torch.zeros(len(values), dtype=torch.float64, device="cpu")
        for row in self._ranks.exchange_alike(f"adds {len(values)} numbers up over the ranks", values):
            total += torch.tensor(row, dtype=torch.float64, device="cpu")
        return total.view(numbers.shape)

    def total_norm(self, named: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        norms = [(name, norm_of(grad, norm_type)) for name, grad in named]
        self._interrupts.begin()
        return self.joined_norm(norms, norm_type)

    def joined_norm(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        first_names = self._topology.first_names
        own_norms = [
            [first_names.get(name, name), str(norm.dtype).removeprefix("torch."), value]
            for (name, norm), value in zip(norms, norms_as_numbers([norm for _, norm in norms]), strict=True)
        ]
        rows = self._ranks.exchange(own_norms)
        by_name = {name: norm for row in rows for name, *norm in row}  # a tied parameter's copies have the same
        names = dict.fromkeys(first_names.values())
        if not by_name.keys() - {""} <= names.keys():  # some have joined layers since, as adapters do
            names = dict.fromkeys(by_place(filter(None, by_name), self._topology.places))
        ordered = [by_name[name] for name in names if name in by_name]
        unnamed = [norm for name, *norm in rows[self._topology.assignment.last] if not name]
        all_norms = [read_number(norm, torch.device("cpu")) for norm in [*ordered, *unnamed]]
        return joined_norm(all_norms, norm_type).to(self._ranks.device)

    def share_events(self, events: Sequence[Event], steps: Sequence[Span]) -> tuple[list[Event], list[Span]]:
        own_events = [[str(event.action), event.lane, event.start, event.end] for event in events]
        by_clock: dict[str, list[Event]] = {}
        spans: list[tuple[str, list[Span]]] = []
        for name, rows, rank_steps in self._ranks.exchange([clock_name(), own_events, list(steps)]):
            rank_events = [Event(Action.parse(action), lane, start, end) for action, lane, start, end in rows]
            by_clock.setdefault(name, []).extend(rank_events)
            spans.append((name, rank_steps))
        ahead = dict(zip(by_clock, ahead_of_first(list(by_clock.values())), strict=True))
        rebased = [
            [(begun - ahead[name], ended - ahead[name]) for begun, ended in rank_steps] for name, rank_steps in spans
        ]
        is_whole = len({len(rank_steps) for rank_steps in rebased}) == 1  # unless a step failed on some ranks alone
        return on_one_clock(list(by_clock.values())), [
            (min(begun for begun, _ in of_step), max(ended for _, ended in of_step))
            for of_step in (zip(*rebased, strict=True) if is_whole else ())
        ]


def written_number(number: Tensor) -> list[Any]:
    """A 0-d tensor for an exchange: its dtype and its value."""
    return [str(number.dtype).removeprefix("torch."), number.item()]


def read_number(written_number: Sequence[Any], device: torch.device) -> Tensor:
    """The inverse of `written_number`."""
    dtype, value = written_number
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)
