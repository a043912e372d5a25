"""ZB-H1: 1F1B with the backward split in two, at 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section 2.1).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("zb-h1", lanes=3, chunks=5)))
    lane 0 |F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    lane 1 |.  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    lane 2 |.  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    makespan 17 slots, bubble 11.8%, peak in flight 3 3 3

Only I keeps the stage before waiting, so W can be put off. Lane r warms up as in 1F1B, with lanes - r forwards, and
puts every W off by r turns: now all lanes hold `lanes` chunks, as 1F1B's first lane does, and the W that are left fill
the cool-down. Where W takes no longer than F and no longer than I, and chunks >= lanes, the lanes idle
(lanes - 1) (F + I - W) instead of (lanes - 1) (F + I + W): a third, where all take the same.
"""

from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns


def build(lanes: int, chunks: int) -> Schedule:
    """ZB-H1 with one stage a lane; fewer chunks than lanes will do."""
    return in_turns("zb-h1", lanes, [chunks], warmup=lambda lane: lanes - lane, late=lambda lane: lane)


BUILDERS = {"zb-h1": build}
