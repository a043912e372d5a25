"""V-Half: half the memory of 1F1B, and less bubble (Qi et al. 2024, arXiv 2405.15362).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("v-half", lanes=3, chunks=3)))
    lane 0 |0F0 0F1 0F2 .   .   5F0 5I0 5W0 5F1 5I1 5W1 .   0I0 0W0 .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    lane 1 |.   1F0 1F1 .   4F0 .   4F1 4I0 4W0 1F2 4I1 1I0 4W1 1W0 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2 .
    lane 2 |.   .   2F0 3F0 2F1 3F1 .   .   3I0 3W0 2I0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
    makespan 23 slots, bubble 21.7%, peak in flight 4 4 4

A lane holds at most lanes + 1 pairs of stage and chunk (lanes + 2 where lanes is even): about half of the 2 lanes that
1F1B's first lane holds, counted so. Where F, I and W of a stage take one slot each and not all chunks fit, the lanes
idle 3 lanes - 4 slots (3 lanes - 7, from 4 on, where lanes is even); 1F1B idles 6 lanes - 6. Where all chunks fit, they
idle what ZB-V's do.

On an even number of lanes the steady state stays as the pattern has it. Moved up as well, it would be as fast with
equal times, and slower with others: on 8 lanes and with 24 chunks, F = 1, I = 1.1, W = 0.6, its bubble is 17.0 %
instead of 15.1 %.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._block import BuildingBlock
from scheduler.schedules._vee import vee


def build(lanes: int, chunks: int) -> Schedule:
    """V-Half with two stages a lane; fewer chunks than lanes will do."""
    even = lanes % 2 == 0
    block = BuildingBlock(steps=(2, 1, 2, 1), turns=(1, 4 if even else 1, 2))
    return vee("v-half", lanes, chunks, block, room=2 * ((lanes + 2) // 2), hold=even and lanes > 2)


BUILDERS = {"v-half": build}
