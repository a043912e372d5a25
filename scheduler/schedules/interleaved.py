"""Interleaved 1F1B: several stages a lane, so that the pipe fills in smaller steps (arXiv 2104.04473, section 2.2).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("interleaved", lanes=2, chunks=4)))
    lane 0 |0F0 0F1 2F0 2F1 0F2 .   2B0 ==  0F3 2B1 ==  2F2 0B0 ==  2F3 0B1 ==  .   2B2 ==  .   2B3 ==  0B2 ==  0B3 ==
    lane 1 |.   1F0 1F1 3F0 3B0 ==  3F1 3B1 ==  1F2 1B0 ==  1F3 1B1 ==  3F2 3B2 ==  3F3 3B3 ==  1B2 ==  1B3 ==  .   .
    makespan 27 slots, bubble 11.1%, peak in flight 5 3

Lane r hosts stages r, r + lanes, r + 2 lanes ... A chunk passes all lanes before it meets the next stage of a lane, so
a lane works in groups: a group's chunks on one stage, then the same chunks on its next stage. The bubble shrinks with
v, the stages a lane: with chunks >= lanes, each lane idles (lanes - 1) T / v, where T is what F and B of a chunk take
on all stages of a lane. Lane r holds at most (v - 1) g + 2(lanes - 1 - r) + 1 chunks of a stage, g the first group's.

Narayanan et al. 2021 want a number of chunks that `lanes` divides, and take groups of `lanes` chunks. Here any number
will do (`rounds`), and where stages are alike and messages take no time, no order of whole backwards in a loop takes
less: the last lane waits for lanes - 1 stages at its start, and leaves as many to go back through at its end; and one
chunk has to pass all stages and back, while on the last stage the others follow it.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns, rounds


def build(lanes: int, chunks: int, stages_per_lane: int = 2) -> Schedule:
    """Interleaved 1F1B for any number of chunks.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has
        stages_per_lane: v, how many stages each lane hosts

    Raises:
        ScheduleError: `stages_per_lane` is not a whole number of at least 1.
    """
    groups = rounds(lanes, chunks)
    return in_turns(
        "interleaved", lanes, groups, lambda lane: (stages_per_lane - 1) * groups[0] + 2 * (lanes - 1 - lane) + 1,
        stages_per_lane=stages_per_lane,
    )  # fmt: skip


BUILDERS = {"interleaved": build}
