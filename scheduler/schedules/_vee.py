"""V schedules from a pattern: the gaps of its warmup and its cooldown are filled by moving all actions up.

    BuildingBlock  --pattern, every 6 slots a chunk-->  action by action  --first gap-->  orders
                                                                      ▲
                                              needs, the room of the lane, ascending chunks

    schedule   steps        turns                          room, in pairs of stage and chunk
    zb-v       4  2  4  2   1  1  1                        2 lanes
    v-half     2  1  2  1   1  1 (even lanes: 4)  2        lanes + 1 (even lanes: lanes + 2)
    v-min      1  1  1  1   1  1 (or 3, or 5)  1           2 ((lanes + 4) // 3)
    1f1b-v     1  1  2  2   1  1  2                        2 ((2 lanes + 3) // 3)

All actions, in the order of their slots in the pattern, move up to the first gap on their lane that what they need
allows, and F no further than to where the lane has room from then on. At the latest that is the slot in the pattern, so
the order can always end. W that no F waits for, as it needs their room, get the gaps that are left in the end: then I
never waits for a W.

Slots only make an order; when an action runs is for `simulate` to say.
"""

from bisect import insort

from scheduler.action import Action, Kind
from scheduler.placement import Placement
from scheduler.schedule import Order, Schedule
from scheduler.schedules._block import PERIOD, BlockSlot, BuildingBlock, length_of, pattern


def vee(name: str, lanes: int, chunks: int, block: BuildingBlock, room: int, hold: bool = False) -> Schedule:
    """The schedule that a block makes.

    Args:
        name: of the schedule
        lanes: how many lanes there are
        chunks: how many chunks a step has
        block: the way of one chunk
        room: the most (stage, chunk) pairs that a lane holds; at least as many as in the pattern
        hold: whether what lies between the first chunk's way back and the last chunk's entry stays where it is
    """
    placement, slots = Placement.vee(lanes), pattern(block, lanes)
    steady = range(slots[4 * lanes - 1].start, PERIOD * (chunks - 1)) if hold else range(0)
    end = max(slot.start for slot in slots) + PERIOD * chunks
    rows = [_LaneSlots(room, chunks, end) for _ in range(lanes)]
    done = [[0] * chunks for _ in slots]
    for start, at, chunk in _in_time(slots, chunks):
        _, after, (stage, kind, _) = slots[at]
        action, row = Action(stage, kind, chunk), rows[placement.lane_of[stage]]
        ready = max(done[after][chunk], done[at][chunk - 1] if chunk else 0)
        if kind is _W and row.has_room_for_all:
            row.late.append((ready, action))
            continue
        if kind is _F:
            ready = row.room_from(ready)
        done[at][chunk] = row.place(action, start if start in steady else ready)
        assert done[at][chunk] <= start + length_of(action)  # nothing comes later than in the pattern
    return Schedule(name, placement, chunks, tuple(row.order() for row in rows))


class _LaneSlots:
    """The slots of a lane that are taken, and by which actions."""

    def __init__(self, room: int, chunks: int, end: int) -> None:
        self._room, self._forwards = room, 2 * chunks
        self._taken = bytearray(end + self._forwards)  # late W come after all else, at worst
        self._placed: list[tuple[int, Action]] = []
        self._starts: list[int] = []  # of F, ascending
        self._ends: list[int] = []  # of W and B, ascending
        self.late: list[tuple[int, Action]] = []

    @property
    def has_room_for_all(self) -> bool:
        """Whether no F is left that might wait for a W to make room."""
        return self._forwards <= self._room or self._forwards == len(self._starts)

    def room_from(self, ready: int) -> int:
        """The first slot, not before `ready`, from which on the lane has room for one more."""
        for last in range(len(self._starts) - 1, self._room - 2, -1):
            freed = self._ends[last + 1 - self._room]  # if this F filled the lane, it was full until then
            if freed <= ready:
                break
            if freed > self._starts[last]:
                return freed
        return ready

    def place(self, action: Action, ready: int) -> int:
        """Puts an action into the first gap, not before `ready`, that is long enough; says where it ends."""
        length = length_of(action)
        start = self._taken.find(bytes(length), ready)
        self._taken[start:start + length] = b"\1" * length
        self._placed.append((start, action))
        if action.kind is _F:
            insort(self._starts, start)
        elif action.kind is not _I:
            insort(self._ends, start + length)
        return start + length

    def order(self) -> Order:
        """All actions, after what is late has got the gaps that are left."""
        for ready, action in sorted(self.late):
            self.place(action, ready)
        return tuple(action for _, action in sorted(self._placed))


def _in_time(slots: list[BlockSlot], chunks: int) -> list[tuple[int, int, int]]:
    """(start, place in the list of slots, chunk) of all actions of the pattern."""
    return sorted((slot.start + PERIOD * chunk, at, chunk) for at, slot in enumerate(slots) for chunk in range(chunks))


_F, _I, _W = Kind.F, Kind.I, Kind.W
