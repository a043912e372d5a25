"""The building block of V schedules: the run of one chunk, if a chunk came every six slots and lanes never idled.

    BuildingBlock: steps, turns  --pattern(lanes)-->  the slot of each action of chunk 0; chunk c runs 6 c slots later

    lane 0  0 ── step ──┐          ┌─── 5 ─ turn ─ 5 ──┐          ┌── 0
    lane 1              1          4                   4          1          stages, on the way of one chunk
    lane 2              └─2 ─turn─ 3                   └─3 ─turn─ 2
            F down          F back up     I or B down     I or B back up     four legs

F, I and W of a chunk, in the two stages of a lane, are six slots of work if each takes one (B takes two). So where no
two actions meet on a lane in the same slot modulo six, chunks that come every six slots keep all lanes busy. A lane
holds as many pairs of stage and chunk as its two F lie before their W, in units of six slots: faster legs hold less,
slower ones leave more slots that can be filled before the pattern has built up and while it runs out (_vee.py).

The blocks are those of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), except for
the turns of V-Min.
"""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from scheduler.action import Action, Kind
from scheduler.placement import Placement

PERIOD = 6


@dataclass(frozen=True)
class BuildingBlock:
    """The way of one chunk, in slots from the start of one action to the start of the next.

    Args:
        steps: from a lane to its neighbour, on each of the four legs
        turns: from a leg's last action to the first of the next leg, on the same lane
        backward: I, with W in the slots that are left; or B
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]
    backward: Kind = Kind.I


class BlockSlot(NamedTuple):
    """`action` of chunk 0 runs in slot `start`, after the action at `after` in the list; the first one after none."""

    start: int
    after: int
    action: Action


def pattern(block: BuildingBlock, lanes: int) -> list[BlockSlot]:
    """The slots of chunk 0 along its way, then those of its W.

    An action that would meet another one modulo six starts as soon as it does not; W take the slots that are left.

    >>> [f"{start}: {action}" for start, _, action in pattern(BuildingBlock((1, 1, 1, 1), (1, 1, 1)), lanes=1)]
    ['0: 0F0', '1: 1F0', '2: 1I0', '3: 0I0', '4: 1W0', '5: 0W0']
    """
    lane_of = Placement.vee(lanes).lane_of
    free = [set(range(PERIOD)) for _ in range(lanes)]
    slots: list[BlockSlot] = []
    for gap, action in zip(_gaps(block, lanes), _way(block, 2 * lanes)):
        after = max(len(slots) - 1, 0)
        start = gap + (slots[after].start if slots else 0)
        slots.append(BlockSlot(_take(free[lane_of[action.stage]], start, action), after, action))
    weights = [
        BlockSlot(_take(free[lane_of[action.stage]], start + 1, action), after, action._replace(kind=Kind.W))
        for after, (start, _, action) in enumerate(slots) if action.kind is Kind.I
    ]
    return slots + weights


def length_of(action: Action) -> int:
    """The number of slots of an action."""
    return 2 if action.kind is Kind.B else 1


def _way(block: BuildingBlock, stages: int) -> list[Action]:
    forwards = [Action(stage, Kind.F, 0) for stage in range(stages)]
    return forwards + [Action(stage, block.backward, 0) for stage in reversed(range(stages))]


def _gaps(block: BuildingBlock, lanes: int) -> list[int]:
    legs = zip((0, *block.turns), block.steps)
    return list(chain.from_iterable([turn, *[step] * (lanes - 1)] for turn, step in legs))


def _take(free: set[int], start: int, action: Action) -> int:
    """Takes the first slots, not before `start`, that are free modulo six; says where they start."""
    first = next(slot for slot in range(start, start + PERIOD) if _residues(slot, action) <= free)
    free -= _residues(first, action)
    return first


def _residues(start: int, action: Action) -> set[int]:
    return {slot % PERIOD for slot in range(start, start + length_of(action))}
