"""Interleaved ZB-H1: several stages a lane and a split backward, at the memory of 1F1B.

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("interleaved-zb", lanes=2, chunks=4)))
    lane 0 |0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    lane 1 |.   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
    makespan 25 slots, bubble 4.0%, peak in flight 4 4

It is ZB-H1 (Qi et al. 2023, arXiv 2401.10241) on the loop of interleaved 1F1B (Narayanan et al. 2021, arXiv
2104.04473), with v stages a lane: lane r runs (v - 1) g + lanes - r forwards before its first backward, g the chunks of
the first group, and puts every W off by r turns. Where F, I and W take the same and chunks >= lanes, each lane idles
(lanes - 1) T / (3v), where T is what F, I and W of a chunk take on all stages of a lane: no order in a loop takes less
time. All lanes hold (v - 1) g + lanes chunks of a stage: where `lanes` divides chunks as much as `lanes` whole chunks.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns, rounds


def build(lanes: int, chunks: int, stages_per_lane: int = 2) -> Schedule:
    """Interleaved ZB-H1 for any number of chunks.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has
        stages_per_lane: v, how many stages each lane hosts

    Raises:
        ScheduleError: `stages_per_lane` is not a whole number of at least 1.
    """
    groups = rounds(lanes, chunks)
    return in_turns(
        "interleaved-zb", lanes, groups, lambda lane: (stages_per_lane - 1) * groups[0] + lanes - lane,
        late=lambda lane: lane, stages_per_lane=stages_per_lane,
    )  # fmt: skip


BUILDERS = {"interleaved-zb": build}
