"""The plan of point-to-point messages: those of a phase of a call between each pair of ranks, in order.

    order of rank 0:  0F0 0F1 0B0 ...   --data/values.py-->   0 to 1: h1 of chunk 0, h1 of chunk 1, ...
    order of rank 1:  1F0 1B0 1F1 ...                    1 to 0: the gradient of h1 of chunk 0, ...

A rank sends as it goes, so the order of a channel is that of its sender's actions; a message goes straight from the
stage that makes a value to the one that reads it, past all ranks between. The scheduler's `messages` says which action
sends along which edge, and which one needs it, as it does for `scheduler.lower`: that has the same messages in the same
order (a test compares them), and `scheduler.verify` proves that such a program cannot wait for ever.

A message proves that its sender has received some of this rank's messages, whose buffers are then freed (`delivered`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from pipeline.data.values import Name, Value, Values
from scheduler import Action, Kind, Placement
from scheduler.programs.messages import messages

RankPair: TypeAlias = tuple[int, int]  # (the rank that sends, the rank that receives)
MessageKey: TypeAlias = tuple[Name, int, bool]  # the value, the chunk, is it its gradient


class P2PMessage(NamedTuple):
    """A message: its name, and the actions that send it and receive it, by their places in their ranks' orders."""

    name: str
    key: MessageKey
    sent_at: int
    taken_at: int


class P2PPlan:
    """All messages of a phase that a rank sends or receives.

    Args:
        orders: the actions of each rank.
        values: the table of values that cross stages.
        placement: the rank of each stage.
        rank: this one.

    Attributes:
        pairs: the channels of all ranks.
        channels: the messages of each channel from or to this rank, in order.
        delivered: for each channel to this rank, by how many messages have come in on it: how many have arrived of the
            opposite channel.
        route_of: for each message its channel and its name.

    Example:
        >>> from pipeline.data.values import chain
        >>> from scheduler import by_name
        >>> schedule = by_name("1f1b", lanes=2, chunks=2)
        >>> plan = P2PPlan(schedule.orders, chain(2), schedule.placement, rank=0)
        >>> [message.name for message in plan.channels[1, 0]]
        ['the gradient of h1 of chunk 0 from stage 1', 'the gradient of h1 of chunk 1 from stage 1']
    """

    def __init__(
        self, orders: Sequence[Sequence[Action]], values: Values, placement: Placement, rank: int
    ) -> None:
        position = {action: index for order in orders for index, action in enumerate(order)}
        numbers = {row.name: number for number, row in enumerate(values.rows)}
        rows = values.between_stages()
        sent = messages(placement, [(row.producer, row.reader) for row in rows]).sent
        pairs = set[RankPair]()
        self.channels: dict[RankPair, list[P2PMessage]] = {}
        for sender, order in enumerate(orders):
            for index, (stage, kind, chunk) in enumerate(order):
                for route in sent.get((stage, kind), ()):
                    pairs.add((sender, route.lane))
                    if rank in (sender, route.lane):
                        row, is_grad = rows[route.edge], route.send is Kind.SEND_B
                        takers = [Action(route.stage, needing_kind, chunk) for needing_kind in route.kinds]
                        taken_at = next(position[taker] for taker in takers if taker in position)
                        name = _message_name(row, numbers[row.name], chunk, is_grad)
                        message = P2PMessage(name, (row.name, chunk, is_grad), index, taken_at)
                        self.channels.setdefault((sender, route.lane), []).append(message)
        self.pairs = frozenset(pairs)
        self.route_of = {
            message.key: (channel, message.name) for channel, messages in self.channels.items() for message in messages
        }
        self.delivered = {channel: self._proved(channel) for channel in self.channels if channel[1] == rank}

    def _proved(self, channel: RankPair) -> list[int]:
        ours = self.channels.get((channel[1], channel[0]), [])
        counts, proved = [0], 0
        for message in self.channels[channel]:
            while proved < len(ours) and ours[proved].taken_at <= message.sent_at:
                proved += 1
            counts.append(proved)
        return counts


def _message_name(row: Value, number: int, chunk: int, is_grad: bool) -> str:
    """A message's name, the same on every rank. Skips of one name in several namespaces have numbers."""
    value = row.name if isinstance(row.name, str) else f"{row.name} (value {number})"
    if is_grad:
        return f"the gradient of {value} of chunk {chunk} from stage {row.reader}"
    return f"{value} of chunk {chunk} for stage {row.reader}"
