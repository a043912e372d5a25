"""Precedence: what must come before each action, and its earliest start.

    needs of every action, chunks that ascend, memory  ──►  Graph  ──heads──►  no plan starts an action earlier
                                                            mirrored ──heads──►  tails: nor ends a plan sooner after it

Two things make an action late: what it needs, one after the other along the longest way; and all that its own lane
has to run before it, one at a time (Carlier and Pinson 1989, "An algorithm for solving the job-shop problem").

Memory speaks too. Where F of chunk j starts, j forwards of its stage have run, and so many I and W that it fits. At
least so many I, whatever runs of W, and the other way round: these are needs. How many of one it takes depends on the
other; so the lane has run one of several sets of actions, and what ends first of them counts (`choices`).

A chain is the actions of one kind and stage, which ascend; whatever an action needs, and all that those need, is so
many from the beginning of each chain.
"""

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from math import inf
from typing import NamedTuple, TypeVar

import numpy

from scheduler.searches.problem import Problem

T = TypeVar("T")
TimedNeeds = list[list[tuple[int, float]]]
Choices = dict[int, list[dict[int, int]]]


class PrecedenceGraph(NamedTuple):
    """Actions that wait for each other.

    Args:
        chunks: the length of a chain: action a is in chain a // chunks
        chains: of each lane
        lane: of each action
        duration: the least that it takes
        needs: what it waits for, and how long that is on its way
        choices: for an F, how many from the chains of its I and W may have run before it; one of these has, or more
    """

    chunks: int
    chains: list[list[int]]
    lane: list[int]
    duration: list[float]
    needs: TimedNeeds
    choices: Choices


def graph_of(problem: Problem) -> PrecedenceGraph:
    """The precedence that every plan for this problem respects."""
    needs: TimedNeeds = [[(need, 0.0) for need in near] for near in problem.near]
    for action in range(problem.count):
        if problem.messages.sender[action] < problem.count:
            needs[action].append((problem.messages.sender[action], problem.messages.travel[action]))
    choices: Choices = {}
    for stage in range(problem.stages):
        chains = [kind * problem.stages + stage for kind in range(1, problem.kinds)]
        for chunk in range(problem.chunks):
            run = _run_before(problem, stage, chunk)
            forward = stage * problem.chunks + chunk
            for at, fewest in zip(chains, map(min, zip(*run))):
                if fewest:
                    needs[forward].append((at * problem.chunks + fewest - 1, 0.0))
            if len(run) > 1:
                choices[forward] = [dict(zip(chains, counts)) for counts in run]
    of_lanes = [[actions[0] // problem.chunks for actions in problem.chains(lane)] for lane in range(problem.lanes)]
    return PrecedenceGraph(problem.chunks, of_lanes, problem.lane, _least(problem), needs, choices)


def mirrored(graph: PrecedenceGraph) -> PrecedenceGraph:
    """The same in reversed time; chunks are numbered from the last, so that chains ascend again."""
    numbers = mirror(graph, range(len(graph.needs)))
    needs: TimedNeeds = [[] for _ in graph.needs]
    for action, before in enumerate(graph.needs):
        for need, travel in before:
            needs[numbers[need]].append((numbers[action], travel))
    return graph._replace(needs=needs, duration=mirror(graph, graph.duration), choices={})


def mirror(graph: PrecedenceGraph, values: Sequence[T]) -> list[T]:
    """The same graph, with chunks numbered from the last."""
    starts = range(0, len(values), graph.chunks)
    return [value for start in starts for value in reversed(values[start:start + graph.chunks])]


def heads(graph: PrecedenceGraph, earliest: Sequence[float], thorough: bool = True) -> list[float] | None:
    """The earliest start of each action.

    Args:
        graph: what waits for what
        earliest: heads that are known already
        thorough: whether to look at what a lane has to run before an action, and not only at what that needs

    Returns:
        At least as much as `earliest`; None where actions need each other.
    """
    needs_of = {action: [need for need, _ in needs] for action, needs in enumerate(graph.needs)}
    try:
        order = list(TopologicalSorter(needs_of).static_order())
    except CycleError:
        return None
    head = list(earliest)
    counts = numpy.zeros((len(head), len(head) // graph.chunks), numpy.int64)
    for action in order:
        time = head[action]
        for need, travel in graph.needs[action]:
            time = max(time, head[need] + graph.duration[need] + travel)
        if thorough and needs_of[action]:
            count = counts[action]
            numpy.max(counts[needs_of[action]], axis=0, out=count)
            for need in needs_of[action]:
                at, chunk = divmod(need, graph.chunks)
                count[at] = max(count[at], chunk + 1)
            time = max(time, _all_run(graph, action, count.tolist(), head, time))
        head[action] = time
    return head


def _all_run(graph: PrecedenceGraph, action: int, count: list[int], head: Sequence[float], earliest: float) -> float:
    """The time at which the lane can have run all that it must run before an action: so many of each chain, and one of
    the choices that it has."""
    chains = graph.chains[graph.lane[action]]
    end = _one_at_a_time(graph, [(at, count[at]) for at in chains], head)
    earliest = max(earliest, end)
    soonest = inf
    for choice in graph.choices.get(action, ()):
        runs = [(at, max(count[at], choice.get(at, 0))) for at in chains]
        soonest = min(soonest, _one_at_a_time(graph, runs, head))
        if soonest <= earliest:
            return earliest
    return max(earliest, soonest) if soonest < inf else earliest


def _one_at_a_time(graph: PrecedenceGraph, runs: Iterable[tuple[int, int]], head: Sequence[float]) -> float:
    """The time at which a lane can have run so many of some chains, each not before its head."""
    actions = chain.from_iterable(range(at * graph.chunks, at * graph.chunks + count) for at, count in runs)
    time = -inf
    for action in sorted(actions, key=head.__getitem__):
        time = max(time, head[action]) + graph.duration[action]
    return time


def _run_before(problem: Problem, stage: int, chunk: int) -> list[tuple[int, int]]:
    """The numbers of I and W of this stage that may have run where F of this chunk starts, and memory allows it: the
    first has the fewest I, and each that follows more I and fewer W.

    The chunks between that many I and this one are held in this stage, and, because I of a stage waits for those of
    all later ones, in all stages before it on this lane.
    """
    cap = problem.caps[problem.placement.lane_of[stage]]
    if cap == inf:
        return [(0, 0)]
    before = [earlier for earlier in problem.placement.stages_of(problem.placement.lane_of[stage]) if earlier < stage]
    below = sum(problem.held[earlier].checkpoint for earlier in before)
    room = cap - below - problem.held[stage].activation
    a_chunk, kept = below + problem.held[stage].checkpoint, problem.held[stage].kept if problem.kinds == 3 else 0
    fewest = max(0, chunk - _whole(room, a_chunk))
    run: list[tuple[int, int]] = []
    for backwards in range(fewest, chunk + 1):
        weights = max(0, backwards - _whole(room - (chunk - backwards) * a_chunk, kept))
        if not run or weights < run[-1][1]:
            run.append((backwards, weights))
    return run


def _whole(room: float, size: float) -> int:
    """The number of one size for which there is room; more than ever needed where they take none."""
    return int(max(0, room / size + 1e-9)) if size else 10**9


def _least(problem: Problem) -> list[float]:
    """The least that each action takes, and that I and W take together, whether a backward is split or whole."""
    split, together, pairs = problem.split.duration, problem.together.duration, problem.pairs
    least = split[:]
    for pair in range(pairs):
        halves = range(pair + pairs, problem.count, pairs)
        total = min(sum(split[half] for half in halves), sum(together[half] for half in halves))
        for half, most in zip(halves, (split[pair + pairs], inf)):
            least[half] = min(most, total)
            total -= least[half]
    return least
