"""Interruptions: the chunks whose backward does not follow their forward before another chunk's on the same device.

    order: 0F0 0F1 0B0 0B1    chunk 0 keeps nothing that chunk 1's backward would have to wait for;
                              chunk 1 is interrupted: 0B0 stands between 0F1 and 0B1

Where no other backward comes between, keeping the activations adds nothing to the peak: recomputing them would hold as
much, at the same moment.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from scheduler.action import Action, Kind


def interrupted(orders: Iterable[Sequence[Action]]) -> frozenset[tuple[int, int]]:
    """The (stage, chunk) pairs that have another backward (B or I) between their F and their own.

    Args:
        orders: for each device, all its actions in the order in which they run

    >>> interrupted([[Action.parse(text) for text in "0F0 0F1 0B0 0B1".split()]])
    frozenset({(0, 1)})
    """
    return frozenset(chain.from_iterable(map(_of_device, orders)))


def _of_device(order: Sequence[Action]) -> Iterator[tuple[int, int]]:
    backwards = 0  # number that ran so far
    at_forward: dict[tuple[int, int], int] = {}
    for action in order:
        pair = (action.stage, action.chunk)
        if action.kind is Kind.F:
            at_forward[pair] = backwards
        elif action.kind is not Kind.W:
            if at_forward[pair] < backwards:
                yield pair
            backwards += 1
