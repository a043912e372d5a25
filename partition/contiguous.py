"""The optimal contiguous partition: the number of layers of each stage, for given costs of the layers.

    costs ──► weights ──► sums ──► cap ──► cuts ──► even cuts ──► layers per stage
     3 1 2    (integers)  prefix   bisect   greedy   neighbours

The answer is exact. Costs become integers (a float is a ratio of two integers), the sum of every run of layers is a
difference of two prefix sums, and the smallest cap that `stages` stages can keep is found by bisection: stages as long
as the cap allows reach the last layer, or nothing does. (Parametric search with a greedy probe, as in Pinar and Aykanat
2004, "Fast optimal load balancing algorithms for 1D partitioning".)

Many splits share the smallest largest stage. Three rules pick one, and none of them can make the largest stage larger:
  [1] a layer that stands alone may exceed the cap, so one huge layer does not excuse a bad split of all the others;
  [2] stages end where an even share of what is left ends, as near as the cap allows;
  [3] then no cut is left that could move and make the two stages beside it more even.
Sums that tie are decided by the number of layers: a layer weighs its cost, plus a grain too small to outweigh any cost.
"""

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import SupportsFloat, SupportsIndex

from partition.errors import PartitionError
from scheduler.errors import whole


def balance_costs(costs: Iterable[SupportsFloat | SupportsIndex], stages: int) -> list[int]:
    """Cut a row of layers into stages so that the most expensive stage is as cheap as it can be.

    Args:
        costs: what each layer costs, in the order of the layers; any unit (seconds, bytes), finite and not negative.
            Numbers of Python and numpy and 0-d tensors, integers, ratios and floats alike: sums are never rounded.
        stages: how many stages to cut, from 1 to the number of layers.

    Returns:
        Layers per stage, `stages` numbers of 1 or more. No other split has a smaller largest sum. Among its equals: no
        cut can move and make the two stages beside it more even.

    Raises:
        PartitionError: a cost is negative, nan, infinite or no number; or there are fewer layers than stages.

    Example:
        >>> balance_costs([1, 2, 3, 4, 5, 6], stages=2)
        [4, 2]
        >>> balance_costs([1, 1, 1, 1, 1, 1, 1], stages=4)
        [2, 2, 1, 2]
        >>> balance_costs([0.5, 0.5, 0.5, 0.5, 99.0], stages=3)
        [2, 2, 1]
    """
    if not isinstance(costs, Iterable):
        raise PartitionError(f"costs is {costs!r}. Give what each layer costs, such as [4, 1, 1, 4, 2].")
    weights = _weights(list(costs))
    stages = check_stages(stages, len(weights))
    sums = [0, *accumulate(weights)]
    cuts = _share_out(sums, stages, _smallest_cap(sums, stages))
    _even_out(sums, cuts)
    return [stop - start for start, stop in pairwise(cuts)]


def check_stages(stages: int, layers: int) -> int:
    """The number of stages as an int; PartitionError where `layers` layers cannot be cut into that many."""
    count = whole(stages)
    if count is None:
        raise PartitionError(f"stages must be a whole number, 1 or more; got {stages!r} ({type(stages).__name__}).")
    if not layers:
        raise PartitionError(f"there are no layers to cut into stages (stages: {count}). Give one layer or more.")
    if not 1 <= count <= layers:
        raise PartitionError(
            f"cannot cut {layers} layers into {count} stages: every stage needs a layer. Ask for 1 to {layers} stages."
        )
    return count


def _weights(costs: Sequence[object]) -> list[int]:
    """Costs -> integers in proportion, each with a grain added; all grains together weigh less than half a unit."""
    ratios = [_ratio(cost) for cost in costs]
    faults = [f"costs[{i}] is {cost!r}" for i, (cost, ratio) in enumerate(zip(costs, ratios)) if ratio is None]
    if faults:
        raise PartitionError(
            f"costs must be numbers, finite and not negative; {', '.join(faults)}. "
            f"Measure again or replace them: a layer that costs nothing is 0."
        )
    exact = [ratio for ratio in ratios if ratio is not None]
    unit = math.lcm(*(denominator for _, denominator in exact))
    grains = 2 * len(exact) + 1  # in a unit: a unit more on one side outweighs any number of layers on the other
    return [numerator * (unit // denominator) * grains + 1 for numerator, denominator in exact]


def _ratio(cost: object) -> tuple[int, int] | None:
    """The cost exactly, as (numerator, denominator); None for what no layer can cost."""
    if isinstance(cost, (str, bytes)):  # float() would read them
        return None
    try:
        ratio = (operator.index(cost), 1)  # type: ignore[arg-type]
    except TypeError:
        try:
            number = cost if isinstance(cost, Fraction) else float(cost)  # type: ignore[arg-type]
            ratio = number.as_integer_ratio()
        except (TypeError, ValueError, OverflowError):  # no number, nan, infinite
            return None
    return ratio if ratio[0] >= 0 else None


def _smallest_cap(sums: Sequence[int], stages: int) -> int:
    """The smallest weight that no stage of two layers or more has to exceed."""
    low, high = 0, sums[-1]
    while low < high:
        cap = (low + high) // 2
        if _fits(sums, stages, cap):
            high = cap
        else:
            low = cap + 1
    return low


def _fits(sums: Sequence[int], stages: int, cap: int) -> bool:
    """Whether stages as long as the cap allows reach the last layer (a shorter stage never helps a later one)."""
    layers, stop = len(sums) - 1, 0
    while stop < layers and stages:
        stop = _longest(sums, stop, cap)
        stages -= 1
    return stop == layers


def _longest(sums: Sequence[int], start: int, cap: int) -> int:
    """The end of the longest stage from layer `start` under the cap; one layer always fits [1]."""
    return max(start + 1, bisect_right(sums, sums[start] + cap, start) - 1)


def _share_out(sums: Sequence[int], stages: int, cap: int) -> list[int]:
    """Cuts [0, ..., layers]: each as near to the end of an even share as it may be while the rest still fits [2]."""
    layers = len(sums) - 1
    cuts = [0]
    for remaining, low in zip(range(stages, 0, -1), _lowest_cuts(sums, stages, cap)):
        start = cuts[-1]
        high = min(_longest(sums, start, cap), layers - (remaining - 1))
        share = 2 * (sums[-1] - sums[start]) // remaining
        cuts.append(_nearest(sums, 2 * sums[start] + share, max(low, start + 1), high))
    return cuts


def _lowest_cuts(sums: Sequence[int], stages: int, cap: int) -> list[int]:
    """For each stage the earliest end from which the stages after it reach the last layer under the cap."""
    cuts = [len(sums) - 1]
    for before in range(stages - 1, 0, -1):  # stages before this cut: each needs a layer
        stop = cuts[-1]
        fits = min(stop - 1, bisect_left(sums, sums[stop] - cap, 0, stop))
        cuts.append(max(before, fits))
    return cuts[::-1]


def _even_out(sums: Sequence[int], cuts: list[int]) -> None:
    """Move each cut to the middle of its neighbours until none moves [3]; the sum of squares falls, so this ends."""
    moved = True
    while moved:
        moved = False
        for s in range(1, len(cuts) - 1):
            before, cut, after = cuts[s - 1 : s + 2]
            middle = sums[before] + sums[after]  # doubled, to stay whole
            best = _nearest(sums, middle, before + 1, after - 1)
            if abs(2 * sums[best] - middle) < abs(2 * sums[cut] - middle):
                cuts[s], moved = best, True


def _nearest(sums: Sequence[int], doubled: int, low: int, high: int) -> int:
    """The cut in low..high whose sum, doubled, is nearest to `doubled`; the earlier of two."""
    cut = bisect_left(sums, (doubled + 1) // 2, low, high)
    return min(range(max(low, cut - 1), cut + 1), key=lambda c: abs(2 * sums[c] - doubled))
