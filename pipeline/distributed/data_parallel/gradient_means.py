"""Means of gradients over replicas: each replica computes those of its shard and sends them to all.

    replica 0  [ a0 | b0 ]  --b0-->  replica 1: (b0 + b1) / 2  --mean-->  [ mean a | mean b ]
    replica 1  [ a1 | b1 ]  --a1-->  replica 0: (a0 + a1) / 2  --mean-->  [ mean a | mean b ]

    sums    bucket by bucket, as soon as one is final: they travel while other stages, here and on other ranks, compute
    means   when all have told their divisors; added in the order of the replicas, half precision in float32

So a mean is the same to the bit on all replicas, and of n replicas each sends 2 (n - 1) / n of the bytes. A gradient
that a replica does not have counts as zero; one that no replica has stays away. The messages tell which there are.

Replica r sends to r + 1, r + 2, ... and takes from r - 1, r - 2, ...; of more than nine replicas none sends a message
before it has taken what came in place of the eighth before. Between devices a transfer holds processors until its other
end has begun, so many sends at a time could leave none for receives, on all replicas alike. In this order room for nine
suffices. For suppose that all devices wait, which begin transfers in order, and take the one that stands earliest in
this order, which is the same for all replicas. It is a send, since a receive stands after its send, and it has begun.
What stands before its receive, at the other end, and has not ended, are eight sends: there is room, and it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from partition.precision import widened
from pipeline.data.loss import divide_
from pipeline.distributed.data_parallel.shards import GradientBucket, Piece, shards_of
from pipeline.distributed.group import RankGroup
from pipeline.transports.channel import ChannelError
from pipeline.transports.message import Message

GradientParts = list[Tensor | None]
_AT_ONCE = 8  # messages that are sent before what came in place of the first is taken


class ReplicaLostError(ChannelError):
    """A connection to a replica broke. Usually another rank knows the reason."""


class _SentBucket(NamedTuple):
    """The sums of a bucket whose shards have been sent to the other replicas.

    Attributes:
        grads: of its parameters.
        shards: by replica.
        own_parts: of the gradients, those of this replica's shard.
    """

    grads: GradientParts
    shards: list[list[Piece]]
    own_parts: GradientParts


class GradientReducer:
    """The gradients of one backward pass, on their way.

    Args:
        ranks: of the replicas.
        series: what the messages of such a pass have in common.
        buckets: what travels, in this order. The last one is put there before it is sent.
    """

    def __init__(self, ranks: RankGroup, series: str, buckets: Sequence[GradientBucket]) -> None:
        self.buckets = list(buckets)
        self._ranks = ranks
        self._series = series
        self._others = [(ranks.rank - turn) % ranks.size for turn in range(1, ranks.size)]  # as they are taken
        self._sent: list[_SentBucket] = []
        self._expected = deque[tuple[int, str]]()  # for each message sent: the replica and the name of the one to take
        self._arrived: dict[tuple[int, str], GradientParts] = {}  # taken early

    @property
    def unsent(self) -> list[GradientBucket]:
        """The buckets that are still to be sent."""
        return self.buckets[len(self._sent) :]

    def send(self, grads: Mapping[int, Tensor]) -> None:
        """Send the sums of the next bucket, to each replica its shard.

        Args:
            grads: by the id of the parameter.
        """
        with among_replicas():
            if not self._sent:
                self._ranks.connect(list(permutations(range(self._ranks.size), 2)))
                self._begin("sums")
            bucket = self.unsent[0]
            bucket_grads = [grads.get(id(parameter)) for parameter in bucket.parameters]
            flat = [grad if grad is None or grad.is_sparse else grad.reshape(-1) for grad in bucket_grads]
            shards = shards_of([parameter.numel() for parameter in bucket.parameters], self._ranks.size)
            parts = [[_cut(flat[piece.parameter], piece) for piece in shard] for shard in shards]
            self._send_each(_named("sums", bucket), [Message(tuple(shard_parts)) for shard_parts in parts])
            self._sent.append(_SentBucket(bucket_grads, shards, parts[self._ranks.rank]))

    def receive(self) -> list[list[GradientParts]]:
        """The sums of this replica's shard, by bucket and replica. All have been sent."""
        with among_replicas():
            sums = [
                self._gathered(_named("sums", bucket), sent.own_parts)
                for bucket, sent in zip(self.buckets, self._sent, strict=True)
            ]
            self._finish()
        return sums

    def means(
        self, sums: list[list[GradientParts]], divisors: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """The parameters that have a gradient on any replica, and its mean.

        Args:
            sums: as `receive` gave them; emptied.
            divisors: of the replicas: their gradients are divided by these first.

        Raises:
            RuntimeError: a gradient is sparse on one replica and dense on another.
        """
        own_means = list[GradientParts]()
        with among_replicas():
            self._begin("means")
            for index, bucket in enumerate(self.buckets):
                columns = zip(self._sent[index].shards[self._ranks.rank], *sums[index], strict=True)
                sums[index] = []
                own_means.append([
                    _mean(summands, divisors, bucket.parameters[piece.parameter]) for piece, *summands in columns
                ])
                message = Message(tuple(own_means[-1]))
                self._send_each(_named("means", bucket), [message] * self._ranks.size)
            pairs = [
                pair
                for bucket, sent, parts in zip(self.buckets, self._sent, own_means, strict=True)
                for pair in _whole(bucket, sent, self._gathered(_named("means", bucket), parts))
            ]
            self._finish()
        return pairs

    def _begin(self, kind: str) -> None:
        names = [_named(kind, bucket) for bucket in self.buckets]
        for rank in self._others:
            self._ranks.connections.receiver(rank).begin(f"{self._series}/{kind}", names)
            self._ranks.connections.sender(rank).begin(f"{self._series}/{kind}", names)

    def _send_each(self, name: str, messages: Sequence[Message]) -> None:
        """Send each other replica its message."""
        own_rank, size = self._ranks.rank, self._ranks.size
        for turn, source in enumerate(self._others, 1):
            if size - 1 > _AT_ONCE == len(self._expected):
                expected = self._expected.popleft()
                self._arrived[expected] = self._received(*expected)
            target = (own_rank + turn) % size
            self._ranks.connections.sender(target).send(name, messages[target])
            self._expected.append((source, name))

    def _gathered(self, name: str, own_parts: GradientParts) -> list[GradientParts]:
        """The parts in the messages of this name, by replica."""
        parts = {rank: self._received(rank, name) for rank in self._others}
        return [parts.get(rank, own_parts) for rank in range(self._ranks.size)]

    def _received(self, rank: int, name: str) -> GradientParts:
        if (rank, name) in self._arrived:
            return self._arrived.pop((rank, name))
        self._ranks.monitor.at = f"the {name}, from replica {rank}"
        return list(self._ranks.connections.receiver(rank).receive(name).tensors)

    def _finish(self) -> None:
        self._expected.clear()
        for rank in self._others:
            self._ranks.connections.receiver(rank).finish()
        for rank in self._others:
            self._ranks.monitor.at = f"the end, for replica {rank} to receive gradients"
            self._ranks.connections.sender(rank).finish()


@contextmanager
def among_replicas() -> Iterator[None]:
    """Within, a connection that breaks is one to a replica: a ReplicaLostError."""
    try:
        yield
    except ChannelError as error:
        raise ReplicaLostError(str(error)) from error


def _named(kind: str, bucket: GradientBucket) -> str:
    return f"{kind} of {bucket.name}"


def _cut(flat: Tensor | None, piece: Piece) -> Tensor | None:
    """A sparse gradient goes whole with the first piece."""
    if flat is None or flat.is_sparse:
        return flat if piece.begin == 0 else None
    return flat[piece.begin : piece.end]


def _mean(
    parts: Sequence[Tensor | None], divisors: Sequence[Tensor | None], parameter: Tensor
) -> Tensor | None:
    """The mean of one piece of a parameter over all replicas. None: no replica has a gradient there."""
    present = [(part, divisor) for part, divisor in zip(parts, divisors, strict=True) if part is not None]
    if not present:
        return None
    if len({part.layout for part, _ in present}) > 1:
        raise RuntimeError(
            f"the gradient of a parameter of shape {list(parameter.shape)} is sparse on one replica and dense on "
            "another. Use sparse=False in its nn.Embedding, or use it alike on all replicas."
        )
    total: Tensor | None = None
    for part, divisor in present:
        summand = widened(divide_(part.to(parameter.device), divisor))
        summand = summand.coalesce() if summand.is_sparse else summand
        total = summand if total is None else total.add_(summand)  # in place: messages are ours, our part is replaced
    assert total is not None  # some part is present
    mean = total.div_(len(parts)).to(present[0][0].dtype)
    return mean.coalesce() if mean.is_sparse else mean


def _whole(
    bucket: GradientBucket, sent: _SentBucket, means: Sequence[GradientParts]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The means of a bucket's parameters, put together from those of every shard."""
    by_parameter: list[list[tuple[Piece, Tensor]]] = [[] for _ in bucket.parameters]
    for shard, shard_means in zip(sent.shards, means, strict=True):
        for piece, mean in zip(shard, shard_means, strict=True):
            if mean is not None:
                by_parameter[piece.parameter].append((piece, mean))
    for parameter, grad, pieces in zip(bucket.parameters, sent.grads, by_parameter, strict=True):
        if pieces:
            yield parameter, _joined(parameter, grad, pieces)


def _joined(parameter: Tensor, grad: Tensor | None, pieces: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """The mean of a parameter, joined from its pieces: in the memory of `grad` where that fits."""
    _, first = pieces[0]
    if first.is_sparse:
        return first.to(parameter.device)
    if grad is None:
        grad = torch.empty_like(parameter, dtype=first.dtype, requires_grad=False)
    flat = grad.view(-1) if grad.is_contiguous() else grad.new_empty(grad.numel())
    for piece, mean in pieces:
        target = flat[piece.begin : piece.end]
        if target.data_ptr() != mean.data_ptr():  # else it was computed in its place
            target.copy_(mean)
    return grad if grad.is_contiguous() else grad.copy_(flat.view(grad.shape))
