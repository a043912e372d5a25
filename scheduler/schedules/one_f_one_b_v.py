"""1F1B-V: two thirds of the memory of 1F1B, with whole backwards (Qi et al. 2024, arXiv 2405.15362).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("1f1b-v", lanes=3, chunks=3)))
    lane 0 |0F0 0F1 0F2 .   .   5F0 5B0 ==  5F1 5B1 ==  5F2 5B2 ==  .   .   0B0 ==  .   .   0B1 ==  .   .   0B2 ==
    lane 1 |.   1F0 1F1 1F2 4F0 .   4F1 .   4B0 ==  4F2 4B1 ==  .   1B0 ==  4B2 ==  1B1 ==  .   .   1B2 ==  .   .
    lane 2 |.   .   2F0 3F0 2F1 3F1 2F2 3F2 .   .   3B0 ==  2B0 ==  3B1 ==  2B1 ==  3B2 ==  2B2 ==  .   .   .   .
    makespan 26 slots, bubble 30.8%, peak in flight 4 5 6

A lane holds at most 2 ((2 lanes + 3) // 3) pairs of stage and chunk: about two thirds of the 2 lanes that 1F1B's first
lane holds, counted so. Where F of a stage takes one slot and B two, and not all chunks fit, the lanes idle about
5 (lanes - 1) slots: exactly so where lanes % 3 is 1, up to 4 less elsewhere. 1F1B idles 6 (lanes - 1).
"""

from scheduler.action import Kind
from scheduler.schedule import Schedule
from scheduler.schedules._block import BuildingBlock
from scheduler.schedules._vee import vee

BLOCK = BuildingBlock(steps=(1, 1, 2, 2), turns=(1, 1, 2), backward=Kind.B)


def build(lanes: int, chunks: int) -> Schedule:
    """1F1B-V with two stages a lane; fewer chunks than lanes will do."""
    return vee("1f1b-v", lanes, chunks, BLOCK, room=2 * ((2 * lanes + 3) // 3))


BUILDERS = {"1f1b-v": build}
