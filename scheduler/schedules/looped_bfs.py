"""Looped breadth-first: several stages a lane, all chunks on one stage before the next (arXiv 2211.05953).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("looped-bfs", lanes=2, chunks=3)))
    lane 0 |0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 ==  2B1 ==  2B2 ==  0B0 ==  0B1 ==  0B2 ==
    lane 1 |.   1F0 1F1 1F2 3F0 3F1 3F2 3B0 ==  3B1 ==  3B2 ==  1B0 ==  1B1 ==  1B2 ==  .   .
    makespan 21 slots, bubble 14.3%, peak in flight 6 6

It is to interleaved 1F1B what GPipe is to 1F1B: as fast where messages take no time, and every lane holds all chunks.
What it buys (Lamy-Poirier 2022): all work on a stage is done in one go, so the weights of a sharded model are gathered
once a stage instead of once a group of chunks, and the messages between stages have chunks - lanes turns to arrive.
Chunks go backward in ascending order, as in every schedule (verification.py).
"""

from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns


def build(lanes: int, chunks: int, stages_per_lane: int = 2) -> Schedule:
    """Looped breadth-first: all forwards stage by stage, then all backwards, the last stage first.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has
        stages_per_lane: how many stages each lane hosts

    Raises:
        ScheduleError: `stages_per_lane` is not a whole number of at least 1.
    """
    return in_turns(
        "looped-bfs", lanes, [chunks], warmup=lambda lane: stages_per_lane * chunks, stages_per_lane=stages_per_lane
    )


BUILDERS = {"looped-bfs": build}
