"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("gpipe", lanes=3, chunks=3)))
    lane 0 |F0 F1 F2 .  .  .  .  .  .  B0 == B1 == B2 ==
    lane 1 |.  F0 F1 F2 .  .  .  B0 == B1 == B2 == .  .
    lane 2 |.  .  F0 F1 F2 B0 == B1 == B2 == .  .  .  .
    makespan 15 slots, bubble 40.0%, peak in flight 3 3 3

Every lane holds all chunks in flight. The paper's figure sends the last chunk back first; here chunks go backward in
ascending order, as in every schedule, so that gradients are bitwise the same (verification.py).
"""

from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns


def build(lanes: int, chunks: int) -> Schedule:
    """GPipe with one stage a lane."""
    return in_turns("gpipe", lanes, [chunks], warmup=lambda lane: chunks)


BUILDERS = {"gpipe": build}
