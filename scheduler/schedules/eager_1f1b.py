"""Eager 1F1B: runs twice as far ahead, so that messages hide behind work (Zhuang et al. 2022, arXiv 2211.05322).

    >>> from scheduler import by_name, draw
    >>> print(draw(by_name("eager-1f1b", lanes=3, chunks=5)))
    lane 0 |F0 F1 F2 F3 F4 .  .  B0 == .  B1 == .  B2 == .  B3 == .  B4 ==
    lane 1 |.  F0 F1 F2 .  B0 == F3 B1 == F4 B2 == .  B3 == .  B4 == .  .
    lane 2 |.  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == F4 B4 == .  .  .  .
    makespan 21 slots, bubble 28.6%, peak in flight 5 3 1

In 1F1B a lane waits, in every turn, until its output has gone one lane on and what came of it has come back. Here
lane r runs 2(lanes - 1 - r) + 1 forwards before its first backward, so that the next message is there already: while
two hops take no longer than F and B of a chunk, each lane idles (lanes - 1) (F + B + 2 hops), as in GPipe. The price
is memory: lane r holds that many chunks, about twice as many as in 1F1B.

`warmup` sets the depth by hand, anywhere between 1F1B (lanes - r) and GPipe (chunks).
"""

from collections.abc import Sequence

from scheduler.errors import ScheduleError, one_each, whole_number
from scheduler.schedule import Schedule
from scheduler.schedules._in_turns import in_turns


def build(lanes: int, chunks: int, warmup: int | Sequence[int] | None = None) -> Schedule:
    """1F1B with a deep warm-up, one stage a lane.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has
        warmup: how many forwards a lane runs before its first backward: one number for all lanes, or one for each;
            None takes 2 * (lanes - 1 - lane) + 1. More than `chunks` count as `chunks`.

    Raises:
        ScheduleError: `warmup` is not at least 1, has not one number for each lane, or rises from a lane to the next:
            then the next waits for forwards that the lane runs only after a backward, which waits for the next.

    >>> print(build(2, 3, warmup=(3, 2)))
    schedule eager-1f1b, chunks 3, stages on lanes 0 1
    lane 0: 0F0 0F1 0F2 0B0 0B1 0B2
    lane 1: 1F0 1F1 1B0 1F2 1B1 1B2
    """
    return in_turns("eager-1f1b", lanes, [chunks], _warmups(lanes, chunks, warmup).__getitem__)


def _warmups(lanes: int, chunks: int, warmup: int | Sequence[int] | None) -> list[int]:
    if warmup is None:
        return [2 * (lanes - 1 - lane) + 1 for lane in range(lanes)]
    listed = one_each("warmup", warmup, lanes)
    capped = [min(whole_number(f"warmup[{lane}]", number, least=1), chunks) for lane, number in enumerate(listed)]
    for lane in range(lanes - 1):
        if capped[lane] < capped[lane + 1]:
            raise ScheduleError(
                f"warmup rises from {listed[lane]} on lane {lane} to {listed[lane + 1]} on lane {lane + 1} "
                f"(warmup: {warmup}), so neither could run its first backward: lane {lane + 1} waits for forward "
                f"{listed[lane]} of lane {lane}, which comes after it. Use a warmup that never rises along the lanes."
            )
    return capped


BUILDERS = {"eager-1f1b": build}
