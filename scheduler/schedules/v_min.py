"""V-Min: a third of the memory of 1F1B (Qi et al. 2024, arXiv 2405.15362).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("v-min", lanes=3, chunks=3)))
    lane 0 |0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    lane 1 |.   1F0 1F1 .   4F0 .   4F1 4I0 4W0 1F2 1I0 1W0 4I1 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2 .
    lane 2 |.   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
    makespan 23 slots, bubble 21.7%, peak in flight 4 4 4

A lane holds at most 2 ((lanes + 4) // 3) pairs of stage and chunk: about a third of the 2 lanes that 1F1B's first lane
holds, counted so. Where F, I and W of a stage take one slot each and not all chunks fit, the lanes idle
4 (lanes - 1) - turn slots, but at least lanes - 1; where all chunks fit, what ZB-V's do. `turn` is the wait of the last
stage between its F and its I: 1, 3 or 5 as lanes % 3 is 1, 0 or 2. The paper's waits 1, 3 or 1; the room is the same,
so with lanes % 3 = 2 the longer wait costs no memory, and leaves 4 slots less idle. The pattern is tight: where F, I
and W take different times, lanes idle for every chunk.

One or two lanes have the room of ZB-V, and run its order.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._block import BuildingBlock
from scheduler.schedules._vee import vee
from scheduler.schedules.zb_v import BLOCK


def build(lanes: int, chunks: int) -> Schedule:
    """V-Min with two stages a lane; fewer chunks than lanes will do."""
    turn = 1 + 2 * ((1 - lanes) % 3)
    block = BuildingBlock(steps=(1, 1, 1, 1), turns=(1, turn, 1)) if lanes > 2 else BLOCK
    return vee("v-min", lanes, chunks, block, room=2 * ((lanes + 4) // 3))


BUILDERS = {"v-min": build}
