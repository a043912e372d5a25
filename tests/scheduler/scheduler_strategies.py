"""Where do the random inputs of the tests of `scheduler` come from, and what are they compared with?

`depends` states the relation a second time, in other words and as slowly as one likes; `schedules` deals
actions out one by one, each once all that it needs is dealt, so that what it makes is right by construction.
"""

from fractions import Fraction

from hypothesis import strategies as st

from scheduler import Action, Costs, Kind, Link, Placement, Schedule, ScheduleError, by_name, names

placements = st.one_of(
    st.builds(Placement.linear, st.integers(1, 5)),
    st.builds(Placement.vee, st.integers(1, 3)),
    st.integers(1, 3).flatmap(lambda lanes: st.builds(Placement.loop, st.just(lanes), st.integers(lanes, 6))),
)


def pieces(stages, chunks, split):
    """All actions of a right schedule."""
    for stage in range(stages):
        for chunk in range(chunks):
            yield Action(stage, Kind.F, chunk)
            for kind in (Kind.I, Kind.W) if (stage, chunk) in split else (Kind.B,):
                yield Action(stage, kind, chunk)


def depends(later, earlier, stages):
    """Whether `later` waits for `earlier`, where both are actions of one right schedule."""
    if later.chunk != earlier.chunk:
        return False
    step = earlier.stage - later.stage
    if later.kind is Kind.F:
        return earlier.kind is Kind.F and step == -1
    if later.kind is Kind.W:
        return earlier.kind is Kind.I and step == 0
    return (earlier.kind is Kind.F and step == 0) or (earlier.kind in (Kind.B, Kind.I) and step == 1)


@st.composite
def schedules(draw):
    placement, chunks = draw(placements), draw(st.integers(1, 4))
    random = draw(st.randoms(use_true_random=False))
    everything = [(stage, chunk) for stage in range(placement.stages) for chunk in range(chunks)]
    split = {pair for pair in everything if random.random() < 0.5}
    left = list(pieces(placement.stages, chunks, split))
    orders = [[] for _ in range(placement.lanes)]
    while left:
        ready = [action for action in left if not any(
            depends(action, other, placement.stages) or ascends_after(action, other) for other in left
        )]
        action = random.choice(ready)
        left.remove(action)
        orders[placement.lane_of[action.stage]].append(action)
    return Schedule("random", placement, chunks, tuple(map(tuple, orders)))


def ascends_after(action, other):
    """Whether `other`, not run yet, must go backward in the same stage before `action`: B is both an I and a W."""
    kinds = {action.kind, other.kind}
    same = kinds <= {Kind.B, Kind.I} or kinds <= {Kind.B, Kind.W}
    return same and action.stage == other.stage and other.chunk < action.chunk


TIMES = st.fractions(0, 9, max_denominator=8)  # exact: a sum of floats rounds


@st.composite
def costs_for(draw, schedule):
    stages, boundaries = ({"min_size": size, "max_size": size} for size in (schedule.stages, schedule.stages - 1))
    each = st.lists(TIMES, **stages)
    heights = draw(st.lists(st.tuples(TIMES, TIMES, TIMES).map(sorted), **stages))
    ways = st.one_of(TIMES, st.builds(Link, TIMES, st.just(Fraction(2))))
    return Costs(
        forward=draw(each), input=draw(each), weight=draw(each), backward=draw(st.none() | each),
        recompute=draw(each), link=draw(ways | st.lists(ways, **boundaries)), message=draw(TIMES),
        speed=draw(st.sampled_from([1, 2, Fraction(1, 2)])), unit=draw(st.sampled_from(["slots", "s"])),
        activation=[high for _, _, high in heights], kept=[part for part, _, _ in heights],
        checkpoint=[part for _, part, _ in heights],
    )


@st.composite
def named_schedules(draw):
    name, lanes, chunks = draw(st.sampled_from(names())), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    try:
        return by_name(name, lanes, chunks)
    except ScheduleError:  # not for so few chunks
        return by_name(name, lanes, 2 * lanes)


NAMED_RUNS = named_schedules().flatmap(lambda schedule: st.tuples(st.just(schedule), costs_for(schedule)))
RUNS = schedules().flatmap(lambda schedule: st.tuples(st.just(schedule), costs_for(schedule)))
