"""ZB-V: no bubble between steps that overlap, at the memory of 1F1B (Qi et al. 2023, arXiv 2401.10241, section 6).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("zb-v", lanes=3, chunks=4)))
    lane 0 |0F0 0F1 0F2 0F3 .   5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 0I0 5W2 0W0 5F3 5I3 0I1 5W3 0I2 0W1 0I3 0W2 0W3 .
    lane 1 |.   1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 1I0 4W1 1W0 4F3 4I2 1I1 4W2 4I3 1I2 1W1 1I3 4W3 1W2 1W3 .
    lane 2 |.   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 2I0 3W0 2W0 2F3 3F3 3I1 2I1 3I2 2I2 3W1 3I3 2I3 2W1 3W2 2W2 3W3 2W3
    makespan 26 slots, bubble 7.7%, peak in flight 5 6 6

The lanes idle lanes - 1 slots where F, I and W of a stage take one each and chunks >= lanes: no order takes less time.
Where also chunks >= 2 lanes - 1, no lane idles between its own start and end (`span_bubble` is 0). All lanes hold
at most 2 lanes pairs of stage and chunk: as much as `lanes` chunks of a whole lane, as 1F1B's first lane does. Each
chunk less than lanes idles 2 slots more, and 4 where there are less than half as many. The order is made for equal
times; the authors look for one with times that were measured.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._block import BuildingBlock
from scheduler.schedules._vee import vee

BLOCK = BuildingBlock(steps=(4, 2, 4, 2), turns=(1, 1, 1))


def build(lanes: int, chunks: int) -> Schedule:
    """ZB-V with two stages a lane; fewer chunks than lanes will do."""
    return vee("zb-v", lanes, chunks, BLOCK, room=2 * lanes)


BUILDERS = {"zb-v": build}
