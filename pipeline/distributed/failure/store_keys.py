"""The keys of heartbeats and failures in a store of torch.distributed.

    beat/<rank>          the rank's latest sign of life, overwritten
    fail/<generation>    the first failure of that generation; those of earlier generations are deleted in the end

A store that does not answer blocks its caller for as long as that lasts (its own timeouts do not help there), so one
thread alone uses a StoreKeys. The store is cloned: the clone has a connection of its own.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from pipeline.distributed.failure.errors import Failure
from pipeline.distributed.failure.heartbeat import Heartbeat

KEPT = 4  # failures: a rank that was stopped for some of them still finds its own


class StoreKeys:
    """The keys of one monitor.

    Args:
        store: any store; all ranks give one that leads to the same place.
        prefix: goes before every key.
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int) -> None:
        self._store = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]  # torch's stub lacks it
        self._rank = rank
        self._size = size
        self._known_ranks = {rank}
        self._oldest = 0

    def say(self, beat: Heartbeat) -> None:
        """Write this rank's heartbeat."""
        self._store.set(_beat(self._rank), json.dumps(beat))

    def beats(self) -> dict[int, Heartbeat]:
        """The heartbeats of all other ranks that ever wrote one."""
        unseen = set(range(self._size)) - self._known_ranks  # multi_get would wait for a key that is not there
        self._known_ranks.update(rank for rank in unseen if self._store.check([_beat(rank)]))
        ranks = sorted(self._known_ranks - {self._rank})
        if not ranks:
            return {}
        texts = self._store.multi_get([_beat(rank) for rank in ranks])
        return {rank: Heartbeat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def post(self, generation: int, failure: Failure) -> Failure:
        """Make `failure` that of its generation unless there is one; return the generation's failure."""
        return Failure(*json.loads(self._store.compare_set(_fail(generation), "", json.dumps(failure))))

    def failure(self, generation: int) -> Failure | None:
        """The failure of a generation, or None."""
        key = _fail(generation)
        return Failure(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def forget_before(self, generation: int) -> None:
        """Delete the failures that no rank can ask for any more."""
        while self._oldest < generation - KEPT:
            self._store.delete_key(_fail(self._oldest))
            self._oldest += 1


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _fail(generation: int) -> str:
    return f"fail/{generation}"
