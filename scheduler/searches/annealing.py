"""Simulated annealing of a plan on the orders of its lanes.

    Plan ──► IncrementalTiming ──► move an action past a few others ──► no longer, or by luck ──► ... ──► the best Plan

Most moves are of an action on a critical path, because only those can make a plan shorter; the others drift. A move
that makes the value larger by x is taken with probability exp(-x / temperature), and the temperature falls from a
share of the mean duration to a smaller one (Kirkpatrick, Gelatt and Vecchi 1983). Where a whole backward is cheaper
than its halves, some moves join or split one.

Effort is counted in work, not in seconds, so that the same seed gives the same plan anywhere: about 1 for each action
whose times are worked out.
"""

from collections.abc import Callable
from math import inf, log
from random import Random

from scheduler.searches.incremental_timing import IncrementalTiming
from scheduler.searches.problem import LaneOrders, Problem


def anneal(
    problem: Problem,
    plan: LaneOrders,
    work: float,
    seed: int,
    enough: float = -inf,
    hot: float = 0.3,
    cold: float = 0.01,
) -> LaneOrders:
    """Searches around a plan.

    Args:
        problem: what is searched for
        plan: where to start: it can end, and fits
        work: how much may be done
        seed: of the random moves
        enough: a value that cannot be beaten, where the search stops
        hot: the first temperature, as a share of the mean duration of an action
        cold: the last one

    Returns:
        The best plan that was met: at least as good as `plan`.
    """
    timing, random = IncrementalTiming(problem, plan), Random(seed).random
    flippable = [pair for pair in range(problem.pairs) if problem.is_dearer_split(pair)]
    mean = sum(timing.times.duration) / problem.count
    best, lowest, remaining = timing.plan(), timing.value, work
    while remaining > 0 and lowest > enough * (1 + _ROUNDING) and mean:
        temperature = mean * cold * (hot / cold) ** (remaining / work)
        allowed = timing.value - temperature * log(1 - random())
        if flippable and random() < _FLIPS:
            remaining -= _flip(timing, flippable[int(random() * len(flippable))], allowed)
        else:
            remaining -= _shift(timing, random, allowed)
        if timing.value < lowest:
            best, lowest = timing.plan(), timing.value
    return best


def _shift(timing: IncrementalTiming, random: Callable[[], float], allowed: float) -> float:
    """Moves a random action past a few others if the value stays within what is allowed; says how much work it was."""
    problem = timing.problem
    action = int(random() * problem.count)
    if random() > _DRIFT and timing.slack(action) > _ROUNDING * timing.value:
        return _LOOKED
    lane, position = problem.lane[action], timing.rank[action]
    order, reach = timing.orders[lane], 1 + int(random() ** 2 * _REACH)
    if random() < 0.5:
        first, window = position, order[position + 1:position + 1 + reach]
        possible = len(window) == reach and not any(action in timing.near[neighbour] for neighbour in window)
        window.append(action)
    else:
        first = max(position - reach, 0)
        window = order[first:position]
        possible = position >= reach and timing.near[action].isdisjoint(window)
        window.insert(0, action)
    if not possible:
        return 2 * _LOOKED
    if timing.estimate(lane, first, window) > allowed:
        return _ESTIMATED
    timing.change(lane, first, window)
    return _ESTIMATED + problem.count


def _flip(timing: IncrementalTiming, pair: int, allowed: float) -> float:
    """Joins or splits a backward if the value stays within what is allowed; says how much work it was."""
    if not timing.flip(pair):
        return _LOOKED
    if timing.value > allowed or not timing.fits():
        timing.flip(pair)
    return 4 * timing.problem.count


_LOOKED, _ESTIMATED = 3, 20  # work, in actions whose times are worked out; measured
_DRIFT = 0.2  # the share of moves that may be of any action
_FLIPS = 0.02  # the share of moves that join or split a backward
_REACH = 12  # past how many others an action moves at most
_ROUNDING = 1e-9
