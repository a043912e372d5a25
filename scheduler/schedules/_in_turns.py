"""Lanes that mix forwards and backwards: one rule and three numbers, for every schedule on a line or a loop.

    groups   chunks, cut into groups; a lane takes a group through all its stages before the next group
    warmup   how many forwards a lane runs before its first backward; from there on, in turns
    late     how many backwards a weight gradient waits after its own; None where the backward is whole (B)

    p lanes, lane r, m chunks, v stages a lane, g chunks in the first group:

    schedule        groups                warmup                   late
    gpipe           m                     m                        whole
    1f1b            m                     p - r                    whole
    eager-1f1b      m                     2(p - 1 - r) + 1         whole
    looped-bfs      m                     v m                      whole
    interleaved     at least p (rounds)   (v-1)g + 2(p-1-r) + 1    whole
    zb-h1           m                     p - r                    r
    zb-h2           m                     2(p - 1 - r) + 1         2r
    interleaved-zb  at least p (rounds)   (v-1)g + p - r           r

In turns, what a lane holds stays where the warm-up left it.
"""

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

from scheduler.action import Action, Kind
from scheduler.errors import whole_number
from scheduler.placement import Placement
from scheduler.schedule import Order, Schedule


def in_turns(
    name: str, lanes: int, groups: Sequence[int], warmup: Callable[[int], int],
    late: Callable[[int], int | None] = lambda lane: None, stages_per_lane: int = 1,
) -> Schedule:  # fmt: skip
    """The schedule of lanes that mix forwards and backwards by this rule, on a line or a loop.

    Args:
        name: of the schedule
        lanes: how many lanes there are
        groups: how many chunks each group has
        warmup, late: of each lane
        stages_per_lane: v, how many stages each lane hosts

    Raises:
        ScheduleError: `stages_per_lane` is not a whole number of at least 1.
    """
    stages_per_lane = whole_number("stages_per_lane", stages_per_lane, least=1)
    placement = Placement.loop(lanes, stages_per_lane * lanes)
    orders = tuple(_order(placement.stages_of(lane), groups, warmup(lane), late(lane)) for lane in range(lanes))
    return Schedule(name, placement, sum(groups), orders)


def _order(stages: Sequence[int], groups: Sequence[int], warmup: int, late: int | None = None) -> Order:
    """The order of one lane: `warmup` forwards, then a backward, what is due of the weights, and a forward in turn.

    Args:
        stages: the stages of the lane, ascending
        groups: how many chunks each group has
        warmup: how many forwards come before the first backward; what is more than there are does not count
        late: how many backwards lie between an I and its W; None for whole backwards

    >>> print(*_order(stages=[0], groups=[3], warmup=2))
    0F0 0F1 0B0 0F2 0B1 0B2
    >>> print(*_order(stages=[0], groups=[3], warmup=2, late=1))
    0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2
    >>> print(*_order(stages=[0, 2], groups=[2], warmup=3))
    0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1
    """
    forwards = _walk(stages, groups, Kind.F)
    backwards = _walk(stages[::-1], groups, Kind.B if late is None else Kind.I)
    weights: list[Action | None] = [] if late is None else [*[None] * late, *_walk(stages[::-1], groups, Kind.W)]
    turns = zip_longest(backwards, weights, forwards[warmup:])
    return (*forwards[:warmup], *(action for action in chain.from_iterable(turns) if action))


def rounds(lanes: int, chunks: int) -> tuple[int, ...]:
    """As many groups as there can be of at least `lanes` chunks: as even as can be, larger ones first.

    The first chunk of a group has passed all lanes when the last of `lanes` chunks has left the first lane: a smaller
    group lets lanes wait. A larger one holds more. The first group sets the warm-up, so it has to be the largest.

    >>> rounds(lanes=3, chunks=11), rounds(lanes=3, chunks=2)
    ((4, 4, 3), (2,))
    """
    count = max(1, chunks // lanes)
    size, remainder = divmod(chunks, count)
    return (size + 1,) * remainder + (size,) * (count - remainder)


def _walk(stages: Sequence[int], groups: Sequence[int], kind: Kind) -> list[Action]:
    actions: list[Action] = []
    first = 0
    for size in groups:
        actions += [Action(stage, kind, chunk) for stage in stages for chunk in range(first, first + size)]
        first += size
    return actions
