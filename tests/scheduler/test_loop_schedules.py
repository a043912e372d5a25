"""Laws of the schedules on a line and on a loop, section 2.1 of the reference.

p lanes, m chunks, v stages a lane, r a lane. f, i, w are what F, I and W of a chunk take on one stage, c a hop. Times
are whole numbers, so that laws hold exactly.
"""

from itertools import product

import pytest
from cover import either
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Action, Costs, Kind, Placement, Schedule, ScheduleError, by_name, simulate, verify

LANES = range(1, either(6, 9))
CHUNKS = either([*range(1, 9), 10, 12, 15], range(1, 25))
WHOLE = [(1, 1, 1, 0), (2, 4, 3, 0), (3, 1, 1, 0)]
SHORT_W = [(1, 1, 1, 0), (3, 3, 2, 0), (2, 4, 1, 0), (5, 2, 2, 0)]  # W takes no longer than F, and no longer than I

per_lanes = pytest.mark.parametrize("p", LANES)
per_size = pytest.mark.parametrize("p, v", list(product(LANES, range(1, either(4, 5)))))


def costs(f, i, w, c):
    return Costs(forward=f, input=i, weight=w, link=c)


def walk(kinds, p, v, m, r, group):
    """Megatron's rule, as arithmetic: the k-th action of these kinds on lane r."""
    for k in range(v * m):
        turn, local, chunk = k // (group * v), k // group % v, k % group
        backward = kinds != "F"
        for kind in kinds:
            yield Action((v - 1 - local if backward else local) * p + r, Kind(kind), turn * group + chunk)


# ------------------------------------------------------------------------------------------------------- eager 1F1B


@pytest.mark.parametrize("f, i, w, c", [(1, 1, 1, 0), (1, 1, 1, 1), (3, 2, 1, 3), (2, 5, 3, 5), (185, 181, 93, 6)])
@per_lanes
def test_eager_1f1b_idles_lanes_minus_1_times_t_plus_two_links_while_two_hops_take_no_longer_than_t(p, f, i, w, c):
    t = f + i + w
    assert 2 * c <= t
    for m in CHUNKS:
        assert simulate(by_name("eager-1f1b", p, m), costs(f, i, w, c)).makespan == m * t + (p - 1) * (t + 2 * c)


@per_lanes
def test_eager_1f1b_holds_a_chunk_more_than_twice_the_lanes_after_it(p):
    for m in CHUNKS:
        peaks = simulate(by_name("eager-1f1b", p, m)).peak_in_flight
        assert peaks == tuple(min(m, 2 * (p - 1 - r) + 1) for r in range(p))


@per_lanes
def test_eager_1f1b_is_1f1b_at_its_warmup_and_gpipe_at_all_chunks(p):
    for m in CHUNKS:
        assert by_name("eager-1f1b", p, m, warmup=range(p, 0, -1)).orders == by_name("1f1b", p, m).orders
        assert by_name("eager-1f1b", p, m, warmup=m).orders == by_name("gpipe", p, m).orders


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 12))
@settings(derandomize=True, deadline=None)
def test_eager_1f1b_is_right_exactly_where_its_warmup_never_rises(warmup, m):
    p, capped = len(warmup), [min(number, m) for number in warmup]
    unchecked = Schedule("any", Placement.linear(p), m, tuple(eager_order(r, m, capped[r]) for r in range(p)))
    if capped == sorted(capped, reverse=True):
        schedule = by_name("eager-1f1b", p, m, warmup=warmup)
        assert schedule.orders == unchecked.orders
        verify(schedule)
        assert simulate(schedule).peak_in_flight == tuple(capped)
    else:
        with pytest.raises(ScheduleError, match=r"warmup rises from \d+ on lane \d+ to \d+ on lane \d+ .* never rises"):
            by_name("eager-1f1b", p, m, warmup=warmup)
        with pytest.raises(ScheduleError, match="cannot end"):
            verify(unchecked)


def eager_order(r, m, warm):
    order = [Action(r, Kind.F, chunk) for chunk in range(warm)]
    for chunk in range(m):
        order.append(Action(r, Kind.B, chunk))
        order += [Action(r, Kind.F, warm + chunk)] * (warm + chunk < m)
    return tuple(order)


@pytest.mark.parametrize("warmup, words", [
    ((2, 1), "warmup lists 2 numbers but there are 3 lanes .* List 3"),
    ((2, 0, 1), r"warmup\[1\] is 0, but must be a whole number of at least 1"),
    (1.5, r"warmup\[0\] is 1.5, but must be a whole number"),
    ("321", r"warmup\[0\] is '321', but must be a whole number"),
    ((3, 1, 2), "warmup rises from 1 on lane 1 to 2 on lane 2 .* lane 2 waits for forward 1 of lane 1"),
])
def test_a_wrong_warmup_is_refused(warmup, words):
    with pytest.raises(ScheduleError, match=words):
        by_name("eager-1f1b", 3, 4, warmup=warmup)


# ---------------------------------------------------------------------------------------- interleaved and looped-bfs


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@per_size
def test_whole_backwards_in_a_loop_take_the_least_time_possible(p, v, name):
    """The last lane has p - 1 stages before and after its m v, or a chunk p v on its way, with m - 1 behind it."""
    for m, (f, i, w, c) in product(CHUNKS, WHOLE):
        timeline = simulate(by_name(name, p, m, stages_per_lane=v), costs(f, i, w, c))
        stages = max(m * v + p - 1, p * v + m - 1)
        assert timeline.makespan == stages * (f + i + w)
        assert timeline.bubble == pytest.approx(1 - m * v / stages)


@per_size
def test_interleaved_idles_lanes_minus_1_times_t_over_v_where_lanes_divide_chunks(p, v):
    for m in range(p, either(15, 25), p):
        assert simulate(by_name("interleaved", p, m, stages_per_lane=v)).makespan == 3 * m * v + 3 * (p - 1)


@per_size
def test_interleaved_holds_what_megatron_holds_where_lanes_divide_chunks(p, v):
    for m in range(p, either(15, 25), p):
        peaks = simulate(by_name("interleaved", p, m, stages_per_lane=v)).peak_in_flight
        assert peaks == tuple(min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p))


@per_size
def test_interleaved_is_megatrons_order_and_with_even_rounds_torchs(p, v):
    for m in CHUNKS:
        rounds = max(1, m // p)
        if m % rounds == 0:
            group = m // rounds
            for r, order in enumerate(by_name("interleaved", p, m, stages_per_lane=v).orders):
                ahead = min(m * v, (v - 1) * group + 2 * (p - 1 - r))  # as they count: the F of the first pair not
                assert order == in_pairs(p, v, m, r, group, ahead)


def in_pairs(p, v, m, r, group, ahead):
    forwards, backwards = list(walk("F", p, v, m, r, group)), list(walk("B", p, v, m, r, group))
    pairs = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return (*forwards[:ahead], *pairs, *backwards[m * v - ahead:])


@per_lanes
def test_with_one_stage_a_lane_a_loop_is_a_line(p):
    for m in CHUNKS:
        for loop, line in [("interleaved", "eager-1f1b"), ("looped-bfs", "gpipe"), ("interleaved-zb", "zb-h1")]:
            one = by_name(loop, p, m, stages_per_lane=1)
            assert (one.orders, one.placement) == (by_name(line, p, m).orders, by_name(line, p, m).placement)


@per_size
def test_looped_bfs_holds_all_chunks_and_works_on_a_stage_in_one_go(p, v):
    for m in CHUNKS:
        schedule = by_name("looped-bfs", p, m, stages_per_lane=v)
        assert simulate(schedule).peak_in_flight == (m * v,) * p
        for order in schedule.orders:
            assert sum(one.stage != other.stage for one, other in zip(order, order[1:])) == 2 * (v - 1)


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs", "interleaved-zb"])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True, None, (2,)])
def test_a_wrong_number_of_stages_a_lane_is_refused(name, wrong):
    with pytest.raises(ScheduleError, match="stages_per_lane is .* must be a whole number of at least 1"):
        by_name(name, 2, 4, stages_per_lane=wrong)


# ------------------------------------------------------------------------------------------- zb-h1 and interleaved-zb


@per_lanes
def test_zb_h1_idles_lanes_minus_1_times_f_plus_i_minus_w(p):
    for m, (f, i, w, c) in product(CHUNKS, SHORT_W):
        makespan = simulate(by_name("zb-h1", p, m), costs(f, i, w, c)).makespan
        if m >= p:
            assert makespan == m * (f + i + w) + (p - 1) * (f + i - w)
        if m <= p:
            assert makespan == (m + p - 1) * (f + i) + w


@per_lanes
def test_zb_h1_holds_on_every_lane_what_the_first_lane_of_1f1b_holds(p):
    for m in CHUNKS:
        assert simulate(by_name("zb-h1", p, m)).peak_in_flight == (min(m, p),) * p


@per_size
def test_interleaved_zb_takes_the_least_time_possible_where_f_i_and_w_take_the_same(p, v):
    """Lane p - 1 starts p - 1 stages late. With few chunks the first lane waits for its first I, or one chunk leads."""
    for m in CHUNKS:
        schedule = by_name("interleaved-zb", p, m, stages_per_lane=v)
        verify(schedule)
        timeline = simulate(schedule)
        if m >= p:
            assert timeline.makespan == 3 * v * m + p - 1
            assert timeline.bubble == pytest.approx((p - 1) / (3 * v * m + p - 1))
        if m <= p:
            first_input, chain = p * v + p - 1, 2 * (p * v - 1)
            assert timeline.makespan == max(first_input + 2 * m * v, chain + 2 * m + 1)


@per_size
def test_interleaved_zb_idles_lanes_minus_1_times_f_plus_i_minus_w_over_v_where_lanes_divide_chunks(p, v):
    for m, (f, i, w, c) in product(range(p, either(15, 25), p), SHORT_W):
        timeline = simulate(by_name("interleaved-zb", p, m, stages_per_lane=v), costs(f, i, w, c))
        assert timeline.makespan == m * v * (f + i + w) + (p - 1) * (f + i - w)


@per_size
def test_interleaved_zb_holds_lanes_chunks_and_of_all_stages_but_one_what_its_first_group_has_more(p, v):
    for m in CHUNKS:
        peaks = simulate(by_name("interleaved-zb", p, m, stages_per_lane=v)).peak_in_flight
        group = -(-m // max(1, m // p))
        assert peaks == (min(m, p) * v + (v - 1) * max(0, group - p),) * p


# ------------------------------------------------------------------------------------------------------------- zb-h2


@pytest.mark.parametrize("f, i, w, c", [*SHORT_W, (1, 1, 1, 1), (3, 3, 2, 1), (5, 2, 2, 3)])
@per_lanes
def test_zb_h2_idles_lanes_minus_1_times_f_plus_i_plus_two_hops_minus_twice_w_in_its_span(p, f, i, w, c):
    for m in range(2 * p, either(15, 25)):
        timeline = simulate(by_name("zb-h2", p, m), costs(f, i, w, c))
        work, idle = m * (f + i + w), (p - 1) * (f + i + 2 * c - 2 * w)
        assert timeline.span_bubble == pytest.approx(idle / (work + idle), abs=1e-12)


@per_lanes
def test_zb_h2_has_no_bubble_in_its_span_and_with_a_barrier_that_of_zb_h1(p):
    for m in range(2 * p, either(15, 25)):
        timeline = simulate(by_name("zb-h2", p, m))
        assert timeline.span_bubble == 0
        assert timeline.makespan == simulate(by_name("zb-h1", p, m)).makespan == 3 * m + p - 1


@per_lanes
def test_zb_h2_holds_twice_the_lanes_minus_1_on_every_lane(p):
    for m in range(2 * p, either(15, 25)):
        assert simulate(by_name("zb-h2", p, m)).peak_in_flight == (2 * p - 1,) * p


@per_lanes
def test_zb_h2_is_refused_for_less_than_two_chunks_a_lane(p):
    for m in range(1, 2 * p):
        with pytest.raises(ScheduleError, match=f"2 chunks a lane, but there are {m} chunks for {p} lanes. "
                                                f"Use chunks={2 * p} or more, or zb-h1"):
            by_name("zb-h2", p, m)


@pytest.mark.parametrize("name, ahead, late", [
    ("zb-h1", lambda p, r: p - r, lambda p, r: r),
    ("zb-h2", lambda p, r: 2 * p - 1 - 2 * r, lambda p, r: 2 * r),
])
@per_lanes
def test_zb_h1_and_zb_h2_hold_warmup_chunks_before_i_and_late_ones_before_w(p, name, ahead, late):
    """(p - r) M_B + r M_W, and (2p - 1 - 2r) M_B + 2r M_W, for any M_W that is not above M_B."""
    for m, kept in product(range(2 * p, either(15, 25)), (0, 1, 2, 5)):
        for r, order in enumerate(by_name(name, p, m).orders):
            assert most_held(order, before_input=5, before_weight=kept) == 5 * ahead(p, r) + kept * late(p, r)


def most_held(order, before_input, before_weight):
    held, most = 0, 0
    for _, kind, _ in order:
        held += before_input if kind is Kind.F else 0
        most = max(most, held)
        held -= {Kind.F: 0, Kind.I: before_input - before_weight, Kind.W: before_weight}[kind]
    return most
