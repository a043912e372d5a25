"""Means of gradients over replicas: each replica computes those of its shard and sends them to all.

    replica 0  [ a0 | b0 ]  --b0-->  replica 1: (b0 + b1) / 2  --mean-->  [ mean a | mean b ]
    replica 1  [ a1 | b1 ]  --a1-->  replica 0: (a0 + a1) / 2  --mean-->  [ mean a | mean b ]

    sums    bucket by bucket, as soon as one is final: they travel while other stages, here and on other ranks, compute
    means   when the divisors of all replicas are known; added in the order of the replicas, half precision in float32

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

import torch
from torch import Tensor

from partition.precision import HALF
from pipeline.data.loss import divide_
from pipeline.distributed.data_parallel.shards import GradientBucket, Piece, shards_of
from pipeline.distributed.group import RankGroup
from pipeline.transports.channel import ChannelError
from pipeline.transports.message import Message

GradientParts = list[Tensor | None]
_AT_ONCE = 8  # messages that are sent before what came in place of the first is taken


class ReplicaLostError(ChannelError):
    """A connection to a replica broke. Usually another rank knows the reason."""


class GradientReducer:
    """The gradients of one backward pass, on their way.

    Args:
        ranks: of the replicas.
        series: what the messages of such a pass have in common.
        buckets: what travels, in this order. The last one is known at the end.
    """

    def __init__(self, ranks: RankGroup, series: str, buckets: Sequence[GradientBucket]) -> None:
        self._ranks = ranks
        self._series = series
        self._buckets = list(buckets)
        self._note: tuple[Tensor | None, ...] = ()  # with the last bucket: whole numbers, a divisor
        self._others = [(ranks.rank - turn) % ranks.size for turn in range(1, ranks.size)]  # as they are taken
        self._grads: list[list[Tensor | None]] = []  # of the buckets that were sent, by parameter
        self._shards: list[list[list[Piece]]] = []  # of those, by replica
        self._expected = deque[tuple[int, str]]()  # for each message sent: the replica and the name of the one to take
        self._arrived: dict[tuple[int, str], tuple[Tensor | None, ...]] = {}  # taken early

    @property
    def early(self) -> GradientBucket | None:
        """The next bucket to send. None: it is the last one."""
        return self._buckets[len(self._grads)] if len(self._grads) < len(self._buckets) - 1 else None

    def send(self, grads: Mapping[int, Tensor]) -> None:
        """Send the sums of the next bucket, to each replica its shard.

        Args:
            grads: by the id of the parameter.
        """
        with among_replicas():
            self._send(grads)

    def send_last(
        self, bucket: GradientBucket, grads: Mapping[int, Tensor], note: Sequence[int], divisor: Tensor | None
    ) -> None:
        """Send the sums of the last bucket, which is known only now.

        Args:
            note: whole numbers for everyone.
            divisor: what this replica's gradients are to be divided by.
        """
        own_divisor = None if divisor is None else divisor.to("cpu", torch.float64)
        self._buckets[-1] = bucket
        self._note = torch.tensor(note, dtype=torch.int64, device="cpu"), own_divisor
        with among_replicas():
            self._send(grads)

    def _send(self, grads: Mapping[int, Tensor]) -> None:
        if not self._grads:
            self._ranks.connect(list(permutations(range(self._ranks.size), 2)))
            self._begin("sums")
        bucket = self._buckets[len(self._grads)]
        grads_sent = [grads.get(id(parameter)) for parameter in bucket.parameters]
        shards = shards_of([parameter.numel() for parameter in bucket.parameters], self._ranks.size)
        flat = [_flat(grad) for grad in grads_sent]
        parts = {rank: [_cut(flat[piece.parameter], piece) for piece in shards[rank]] for rank in self._others}
        self._send_each(_named("sums", bucket), {rank: Message((*shard, *self._note)) for rank, shard in parts.items()})
        self._grads.append(grads_sent)
        self._shards.append(shards)

    def receive(self) -> tuple[list[list[GradientParts]], list[list[int]], list[Tensor | None]]:
        """The sums of this replica's shard, by bucket and replica; all notes and divisors. All have been sent."""
        rank = self._ranks.rank
        own_shard = [
            [_cut(_flat(grads[piece.parameter]), piece) for piece in shards[rank]]
            for grads, shards in zip(self._grads, self._shards, strict=True)
        ]
        sums: list[list[GradientParts]] = [[parts] * self._ranks.size for parts in own_shard]
        notes = [self._note] * self._ranks.size
        with among_replicas():
            for index, bucket in enumerate(self._buckets):
                for replica in self._others:
                    sums[index][replica] = list(self._received(replica, _named("sums", bucket)))
            self._finish()
        for replica in self._others:
            *sums[-1][replica], note, divisor = sums[-1][replica]
            notes[replica] = note, None if divisor is None else divisor.cpu()
        return sums, [note.tolist() for note, _ in notes if note is not None], [divisor for _, divisor in notes]

    def means(
        self, sums: list[list[GradientParts]], divisors: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """The parameters that have a gradient on any replica, and its mean.

        Args:
            sums: as `receive` gave them; emptied.
            divisors: of the replicas, as `receive` gave them: their gradients are divided by these first.

        Raises:
            RuntimeError: a gradient is sparse on one replica and dense on another.
        """
        rank, own_means = self._ranks.rank, []
        with among_replicas():
            self._begin("means")
            for index, bucket in enumerate(self._buckets):
                parts, sums[index] = sums[index], []
                pieces = self._shards[index][rank]
                columns = zip(pieces, *parts, strict=True)
                own_means.append([_mean(summands, divisors, bucket, piece) for piece, *summands in columns])
                if not bucket.parameters:
                    continue
                message = Message(tuple(own_means[-1]))
                self._send_each(_named("means", bucket), dict.fromkeys(self._others, message))
            pairs = [pair for index in range(len(self._buckets)) for pair in self._whole(index, own_means[index])]
            self._finish()
        return pairs

    def _whole(self, index: int, own_means: GradientParts) -> Iterator[tuple[Tensor, Tensor]]:
        """The means of a bucket, put together from everyone's shard."""
        bucket = self._buckets[index]
        if not bucket.parameters:
            return
        pieces: list[list[tuple[Piece, Tensor | None]]] = [[] for _ in bucket.parameters]
        for rank, shard in enumerate(self._shards[index]):
            shard_means = own_means if rank == self._ranks.rank else self._received(rank, _named("means", bucket))
            for piece, mean in zip(shard, shard_means, strict=True):
                pieces[piece.parameter].append((piece, mean))
        for parameter, grad, means in zip(bucket.parameters, self._grads[index], pieces, strict=True):
            whole = _joined(parameter, grad, means)
            if whole is not None:
                yield parameter, whole

    def _begin(self, kind: str) -> None:
        names = [_named(kind, bucket) for bucket in self._buckets if bucket.parameters or kind == "sums"]
        for rank in self._others:
            self._ranks.connections.receiver(rank).begin(f"{self._series}/{kind}", names)
            self._ranks.connections.sender(rank).begin(f"{self._series}/{kind}", names)

    def _send_each(self, name: str, messages: Mapping[int, Message]) -> None:
        """Send a message to each other replica."""
        own_rank, size = self._ranks.rank, self._ranks.size
        for turn, source in enumerate(self._others, 1):
            if size - 1 > _AT_ONCE == len(self._expected):
                expected = self._expected.popleft()
                self._arrived[expected] = self._received(*expected)
            target = (own_rank + turn) % size
            self._ranks.connections.sender(target).send(name, messages[target])
            self._expected.append((source, name))

    def _received(self, rank: int, name: str) -> tuple[Tensor | None, ...]:
        if (rank, name) in self._arrived:
            return self._arrived.pop((rank, name))
        self._ranks.monitor.at = f"the {name}, from replica {rank}"
        return self._ranks.connections.receiver(rank).receive(name).tensors

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


def _flat(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or grad.is_sparse else grad.reshape(-1)


def _cut(flat: Tensor | None, piece: Piece) -> Tensor | None:
    """A sparse gradient goes whole with the first piece."""
    if flat is None or flat.is_sparse:
        return flat if piece.begin == 0 else None
    return flat[piece.begin : piece.end]


def _mean(
    parts: Sequence[Tensor | None], divisors: Sequence[Tensor | None], bucket: GradientBucket, piece: Piece
) -> Tensor | None:
    """The mean of one piece over all replicas. None: no replica has a gradient there."""
    present = [(part, divisor) for part, divisor in zip(parts, divisors, strict=True) if part is not None]
    if not present:
        return None
    parameter = bucket.parameters[piece.parameter]
    if len({part.layout for part, _ in present}) > 1:
        raise RuntimeError(
            f"the gradient of a parameter of shape {list(parameter.shape)} is sparse on one replica and dense on "
            "another. Use sparse=False in its nn.Embedding, or use it alike on all replicas."
        )
    total: Tensor | None = None
    for part, divisor in present:
        summand = divide_(part.to(parameter.device), divisor)
        summand = summand.to(torch.float32) if summand.dtype in HALF else summand
        summand = summand.coalesce() if summand.is_sparse else summand
        total = summand if total is None else total.add_(summand)  # in place: messages are ours, our part is replaced
    assert total is not None  # some part is present
    mean = total.div_(len(parts)).to(present[0][0].dtype)
    return mean.coalesce() if mean.is_sparse else mean


def _joined(
    parameter: Tensor, grad: Tensor | None, pieces: Sequence[tuple[Piece, Tensor | None]]
) -> Tensor | None:
    """The mean of a parameter, joined from its pieces: in the memory of `grad` where that fits."""
    present = [(piece, mean) for piece, mean in pieces if mean is not None]
    if not present or present[0][1].is_sparse:
        return present[0][1].to(parameter.device) if present else None
    if grad is None:
        grad = torch.empty_like(parameter, dtype=present[0][1].dtype, requires_grad=False)
    flat = grad.view(-1) if grad.is_contiguous() else grad.new_empty(grad.numel())
    for piece, mean in present:
        target = flat[piece.begin : piece.end]
        if target.data_ptr() != mean.data_ptr():  # else it was computed in its place
            target.copy_(mean)
    return grad if grad.is_contiguous() else grad.copy_(flat.view(grad.shape))
