"""ZB-H2: no bubble between steps that overlap, for twice the memory (Qi et al. 2023, arXiv 2401.10241, section 2.2).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("zb-h2", lanes=3, chunks=6)))
    lane 0 |F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
    lane 1 |.  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
    lane 2 |.  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    makespan 20 slots, bubble 10.0%, peak in flight 5 5 5

Lane r runs 2(lanes - 1 - r) + 1 forwards before its first backward, which fills the warm-up, and puts every W off by
2r turns, which fills the cool-down. What is left is skew: lanes start and end one after the other. Where F, I and W
take the same, no lane idles between its own start and end, and steps that need no barrier between them leave no bubble
(`span_bubble`); with a barrier (`bubble`) it is no faster than ZB-H1. All lanes hold 2 lanes - 1 chunks.
"""

from scheduler.errors import refuse_unless_filled
from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns


def build(lanes: int, chunks: int) -> Schedule:
    """ZB-H2 with one stage a lane.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has, at least twice as many as lanes

    Raises:
        ScheduleError: there are fewer chunks, which could not fill the warm-up.
    """
    refuse_unless_filled("zb-h2", "its warm-up", lanes, chunks, "zb-h1")
    return in_turns("zb-h2", lanes, [chunks], lambda lane: 2 * (lanes - 1 - lane) + 1, late=lambda lane: 2 * lane)


BUILDERS = {"zb-h2": build}
