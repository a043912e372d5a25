"""The problem of a search in numbers: tables of actions, and plans that put them in order.

    pose(costs, placement, chunks, memory ...)  ──►  Problem   for each action its lane, its time, what it waits for
    Schedule  --problem.plan-->  Plan  --problem.schedule-->  Schedule

An action is a number here, (kind * stages + stage) * chunks + chunk, kinds F 0, I 1, W 2; `count`, one past the last,
is nobody's. A pair is stage * chunks + chunk. A plan holds the numbers of actions in the order of each lane. Chunks
ascend in each kind of each stage, forwards too, so a plan is a word of letters for each lane.

A whole B is an I that takes as long as B, and a W that takes no time and holds nothing: so the number of actions stays
the same, and a plan only says which backwards are whole. Where nothing may be split, all are, and there are no W.

An action waits for at most one action on another lane, its `sender`, and at most one waits for it there, its
`receiver`; what it needs on its own lane (`near`) the order of the lane has to put before it.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scheduler.action import Action, Kind
from scheduler.memory_model import ChunkMemory
from scheduler.placement import HasPlacement, Placement
from scheduler.schedule import Schedule

Objective = Literal["flush", "span"]


class LaneOrders(NamedTuple):
    """The order of each lane, in numbers, and the pairs (stage * chunks + chunk) whose backward is whole."""

    orders: list[list[int]]
    whole: frozenset[int] = frozenset()


class MessageWaits(NamedTuple):
    """For each action the action that it waits for on another lane, and the one that waits for it there.

    Attributes:
        sender: the action that it waits for; the number of actions where there is none
        travel: the time that the message from there takes
        receiver: the action that waits for it
    """

    sender: list[int]
    travel: list[float]
    receiver: list[int]


class Times(NamedTuple):
    """For each action its duration, and by how much it changes its lane's memory while it runs, and afterwards."""

    duration: list[float]
    need: list[float]
    change: list[float]


@dataclass(frozen=True)
class Problem(HasPlacement):
    """A search problem, in numbers.

    Args:
        placement: which lane hosts which stage
        chunks: of a step
        kinds: 3, or 2 where nothing may be split
        lane: of each action
        messages: between lanes
        near: what it needs on its own lane
        split: durations and memory where every backward is split
        together: the same where every backward is whole
        caps: what each lane may hold
        held: what a chunk holds in each stage
        offset: for each lane, what is added to its end; the largest sum is the value that is to be small
        objective: "flush", then nothing is added; "span", then minus the start of the lane
    """

    placement: Placement
    chunks: int
    kinds: int
    lane: list[int]
    messages: MessageWaits
    near: list[frozenset[int]]
    split: Times
    together: Times
    caps: tuple[float, ...]
    held: tuple[ChunkMemory, ...]
    offset: list[float]
    objective: Objective

    @property
    def count(self) -> int:
        """The number of actions."""
        return self.kinds * self.pairs

    @property
    def pairs(self) -> int:
        """The number of pairs of stage and chunk."""
        return self.stages * self.chunks

    def number(self, action: Action) -> int:
        """The number of an action; B has that of I."""
        return (_KIND[action.kind] * self.stages + action.stage) * self.chunks + action.chunk

    def chains(self, lane: int) -> list[range]:
        """The actions of a lane that ascend: those of one kind and stage."""
        starts = [(kind * self.stages + stage) * self.chunks
                  for kind in range(self.kinds) for stage in self.placement.stages_of(lane)]
        return [range(start, start + self.chunks) for start in starts]

    def near_of(self, action: int, whole: AbstractSet[int]) -> frozenset[int]:
        """The actions that this one waits for on its own lane: where it is a whole backward, the W before it too, so
        that weight gradients ascend."""
        kind, pair = divmod(action, self.pairs)
        before = kind == 1 and self.kinds == 3 and pair in whole and action % self.chunks
        return self.near[action] | {action + self.pairs - 1} if before else self.near[action]

    def times(self, whole: frozenset[int]) -> Times:
        """Durations and memory for a plan, in lists of the caller's own; one more at the end, for nobody."""
        times = Times(*([*column, 0] for column in self.split))
        for pair in whole:
            self.set_whole(times, pair, True)
        return times

    def set_whole(self, times: Times, pair: int, whole: bool) -> None:
        """Joins or splits a backward in `times`."""
        for column, source in zip(times, self.together if whole else self.split):
            for action in range(pair + self.pairs, self.count, self.pairs):
                column[action] = source[action]

    def plan(self, schedule: Schedule) -> LaneOrders:
        """The plan of a right schedule. A whole backward stays whole where halves take longer, and is split where not:
        what waits for I does not wait for W then."""
        orders = [list(self._numbers(order)) for order in schedule.orders]
        pairs = {action.stage * self.chunks + action.chunk for order in schedule.orders for action in order}
        joined = {pair for pair in pairs if divmod(pair, self.chunks) not in schedule.split}
        return LaneOrders(orders, frozenset(filter(self.is_dearer_split, joined)))

    def with_whole(self, plan: LaneOrders) -> LaneOrders:
        """The plan with every W right after its I, and whole where that is cheaper."""
        orders = [list(self._numbers(self._actions(order, frozenset(range(self.pairs))))) for order in plan.orders]
        return LaneOrders(orders, frozenset(filter(self.is_dearer_split, range(self.pairs))))

    def is_dearer_split(self, pair: int) -> bool:
        """Whether a backward takes longer in two halves than whole."""
        return self._backward(self.together, pair) < self._backward(self.split, pair)

    def schedule(self, plan: LaneOrders, name: str) -> Schedule:
        """The schedule of a plan."""
        orders = tuple(tuple(self._actions(order, plan.whole)) for order in plan.orders)
        return Schedule(name, self.placement, self.chunks, orders)

    def allows(self, plan: LaneOrders) -> bool:
        """Whether every lane runs first what an action needs there; then chunks ascend, forwards too."""
        for order in plan.orders:
            done: set[int] = set()
            for action in order:
                if not self.near_of(action, plan.whole) <= done:
                    return False
                done.add(action)
        return True

    def _backward(self, times: Times, pair: int) -> float:
        return sum(times.duration[pair + self.pairs:self.count:self.pairs])

    def _numbers(self, order: Iterable[Action]) -> Iterator[int]:
        for action in order:
            number = self.number(action)
            yield number
            if action.kind is Kind.B and self.kinds == 3:
                yield number + self.pairs

    def _actions(self, order: Iterable[int], whole: frozenset[int]) -> Iterator[Action]:
        for action in order:
            kind, pair = divmod(action, self.pairs)
            is_whole = self.kinds == 2 or pair in whole
            if kind < 2 or not is_whole:
                yield Action(pair // self.chunks, (Kind.F, Kind.B if is_whole else Kind.I, Kind.W)[kind],
                             pair % self.chunks)


_KIND = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}
