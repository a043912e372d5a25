"""The abortable rendezvous: ranks build objects that need all of them, and give up together if one does not come.

    main thread   build(key, make) ──► helper thread: here! ──store──► have all come?  "go" ──► make ──► what was made
                  ChannelError ◄── give_up(), by the monitor                    "void": no rank makes it

Functions that connect processes block until all of them call, and cannot be woken. So no rank begins before all have
come, for which it polls the store; a helper thread does that, since the store itself may not answer. Whether a
rendezvous takes place is decided once, for all: a rank that gives up after all have come takes part nevertheless.

One connection to the store serves them all, but where a helper thread is left behind on it: where many ranks connect to
a store at once, some of them wait a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import TypeVar

import torch.distributed as dist

from pipeline.transports.channel import ChannelError

T = TypeVar("T")

SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks
GO, VOID = "go", "void"


class AbortableRendezvous:
    """A rendezvous at which the ranks of a group build objects together, one after the other.

    Args:
        store: any store of torch.distributed; it is cloned.
        prefix: of every key; no two of them in a store's life share one.
        size: how many ranks there are.

    Example:
        >>> meeting = AbortableRendezvous(dist.HashStore(), "doc", size=1)
        >>> meeting.build("channels", lambda store: "built")
        'built'
    """

    def __init__(self, store: dist.Store, prefix: str, size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._own_store: dist.Store | None = _clone(store)  # now, while there is a store: this waits for one
        self._size = size
        self.is_given_up = False

    def open(self) -> None:
        """Begin: from now on `build` waits."""
        self.is_given_up = False

    def give_up(self) -> None:
        """End the wait that is under way, and all until the next `open`. From any thread."""
        self.is_given_up = True

    def build(self, key: str, make: Callable[[dist.Store], T]) -> T:
        """The result of `make`, which is called when all ranks build under this key.

        Args:
            key: a new one for each object.
            make: is given a store for itself, under the prefix and the key.

        Raises:
            ChannelError: `give_up` was called before that, or before it was made; or the store is gone.
        """
        results, errors = list[T](), list[Exception]()

        def work() -> None:
            try:
                self._own_store = self._own_store or _clone(self._store)
                store = dist.PrefixStore(f"{self._prefix}/{key}", self._own_store)
                if self._takes_place(store):
                    results.append(make(store))
            except Exception as error:
                errors.append(error)

        helper = threading.Thread(target=work, name="pipe builder", daemon=True)
        helper.start()
        while helper.is_alive() and not self.is_given_up:
            helper.join(LONGEST)
        helper.join(4 * LONGEST)  # usually it sees the end; the store may block it
        if helper.is_alive():
            self._own_store = None  # the next helper takes a connection of its own
        if results:
            return results[0]
        if errors:
            raise ChannelError(f"the ranks cannot connect: {errors[0]}") from errors[0]
        raise ChannelError("not all ranks came to connect")

    def _takes_place(self, store: dist.Store) -> bool:
        """Wait until all have come, or one gives up."""
        arrivals = store.add("come", 1)
        pause = SHORTEST
        while arrivals < self._size and not self.is_given_up and not store.check(["outcome"]):
            sleep(pause)
            pause = min(2 * pause, LONGEST)
            arrivals = store.add("come", 0)
        outcome: bytes = store.compare_set("outcome", "", GO if arrivals >= self._size else VOID)
        return outcome == GO.encode()


def _clone(store: dist.Store) -> dist.Store:
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    return clone
