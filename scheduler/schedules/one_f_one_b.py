"""1F1B: as soon as a chunk can go back it does (PipeDream-Flush, Narayanan et al. 2020, arXiv 2006.09503).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("1f1b", lanes=3, chunks=5)))
    lane 0 |F0 F1 F2 .  .  .  .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 ==
    lane 1 |.  F0 F1 .  .  B0 == F2 B1 == F3 B2 == F4 B3 == .  B4 == .  .
    lane 2 |.  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == .  .  .  .
    makespan 21 slots, bubble 28.6%, peak in flight 3 2 1

Lane r runs one forward for each lane after it (warm-up), then a forward and a backward in turn (steady), then the
backwards that are left (cool-down). It is as fast as GPipe, and holds at most lanes - r chunks instead of all.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns


def build(lanes: int, chunks: int) -> Schedule:
    """1F1B with one stage a lane; fewer chunks than lanes will do."""
    return in_turns("1f1b", lanes, [chunks], warmup=lambda lane: lanes - lane)


BUILDERS = {"1f1b": build}
