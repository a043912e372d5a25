"""Is the same model compared under all schedules, and are the rows what `simulate` says?"""

from fractions import Fraction
from math import inf

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Costs, Link, Placement, ScheduleError, by_name, names, simulate
from scheduler.comparison import Row, compare, of_stages

SIZES = [(lanes, chunks) for lanes in range(1, 7) for chunks in range(1, 13)]
PLACEMENTS = [Placement.linear(3), Placement.loop(3, 6), Placement.loop(3, 9), Placement.vee(3), Placement((2, 1, 0))]

# Bubble if F = I = W, and peak in flight: section 2.3 of the reference page, made by other programs than ours.
KNOWN = [
    (4, 8, {"gpipe": (.2727, 8), "1f1b": (.2727, 4), "interleaved": (.1579, 5.5), "zb-h1": (.1111, 4),
            "zb-h2": (.1111, 7), "interleaved-zb": (.0588, 4)}),
    (4, 64, {"gpipe": (.0448, 64), "1f1b": (.0448, 4), "interleaved": (.0229, 5.5), "zb-h1": (.0154, 4),
             "zb-h2": (.0154, 7), "interleaved-zb": (.0078, 4)}),
    (8, 16, {"gpipe": (.3043, 16), "1f1b": (.3043, 8), "interleaved": (.1795, 11.5), "zb-h1": (.1273, 8),
             "zb-h2": (.1273, 15), "interleaved-zb": (.0680, 8)}),
    (16, 64, {"gpipe": (.1899, 64), "1f1b": (.1899, 16), "interleaved": (.1049, 23.5), "zb-h1": (.0725, 16),
              "zb-h2": (.0725, 31), "interleaved-zb": (.0376, 16)}),
]


def row_of(name, lanes, chunks, costs=Costs(), **more):
    (row,) = compare(lanes, chunks, costs, [name], **more)
    return row


@settings(derandomize=True, deadline=None, max_examples=examples(30))
@given(st.data())
def test_every_schedule_does_the_same_work(data):
    lanes, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    time = st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=lanes, max_size=lanes))
    costs = Costs(*[data.draw(time) for _ in range(3)])
    lists = [cost if isinstance(cost, tuple) else [cost] * lanes for cost in (costs.forward, costs.input, costs.weight)]
    for row in compare(lanes, chunks, costs):
        if not row.reason and row.makespan:
            assert lanes * row.makespan * (1 - row.bubble) == pytest.approx(chunks * sum(map(sum, lists)))


@pytest.mark.parametrize("lanes, chunks, known", KNOWN)
def test_bubbles_and_peaks_are_those_of_the_reference_page(lanes, chunks, known):
    found = {row.name: (row.bubble, row.peak_in_flight) for row in compare(lanes, chunks, names=known)}
    for name, (bubble, peak) in known.items():
        assert found[name] == (pytest.approx(bubble, abs=5e-5), peak), name


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_a_row_is_what_simulate_says_where_a_lane_has_one_stage(lanes, chunks):
    costs = Costs([3 + lane for lane in range(lanes)], 2, 1, recompute=1, link=1, activation=5, kept=2)
    for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1"):
        timeline = simulate(by_name(name, lanes, chunks), costs)
        assert row_of(name, lanes, chunks, costs) == Row(
            name, 1, timeline.makespan, timeline.bubble, timeline.span_bubble, max(timeline.peak_in_flight),
            timeline.peak_memory,
        )


@pytest.mark.parametrize("lanes, chunks", SIZES)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb", "looped-bfs"])
def test_two_stages_a_lane_share_its_costs(name, lanes, chunks):
    whole = Costs([4 + 2 * lane for lane in range(lanes)], 6, 2, activation=4, kept=2)
    half = Costs(2 * [2 + lane for lane in range(lanes)], 3, 1, activation=2, kept=1)
    timeline = simulate(by_name(name, lanes, chunks), half)
    assert row_of(name, lanes, chunks, whole) == Row(
        name, 2, timeline.makespan, timeline.bubble, timeline.span_bubble, max(timeline.peak_in_flight) / 2,
        timeline.peak_memory,
    )


@pytest.mark.parametrize("lanes, chunks", [(1, 3), (3, 5), (4, 8), (5, 10)])
def test_in_units_of_one_share_memory_is_what_is_in_flight(lanes, chunks):
    for row, large in zip(compare(lanes, chunks), compare(lanes, chunks, Costs(activation=8))):
        assert row.peak_memory == row.peak_in_flight
        assert large.peak_memory == 8 * row.peak_memory


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "what", ["forward", "input", "weight", "backward", "recompute", "activation", "kept", "checkpoint"]
)
def test_the_stages_of_a_lane_share_out_all_that_it_costs(what, placement):
    listed = [Fraction(7), Fraction(1, 3), Fraction(5)]
    whole = {"activation": 100} if what in ("kept", "checkpoint") else {}
    shares = getattr(of_stages(Costs(**{what: listed, **whole}), placement), what)
    for lane, cost in enumerate(listed):
        assert sum(shares[stage] for stage in placement.stages_of(lane)) == cost
        assert len({shares[stage] for stage in placement.stages_of(lane)}) == 1
    even = getattr(of_stages(Costs(**{what: Fraction(6), **whole}), placement), what)
    assert sum(even if isinstance(even, tuple) else [even] * 3) == 3 * 6


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_functions_are_asked_for_lanes(placement):
    shared = of_stages(Costs(forward=lambda lane, chunk: Fraction(100 * lane + chunk)), placement)
    for stage, lane in enumerate(placement.lane_of):
        assert shared.forward(stage, 7) * len(placement.stages_of(lane)) == 100 * lane + 7


def test_what_belongs_to_lanes_or_was_not_said_stays():
    shared = of_stages(Costs(speed=[1, 2], link=3, message=4), Placement.loop(2, 6))
    assert (shared.speed, shared.link, shared.message) == ((1, 2), 3, 4)
    assert (shared.backward, shared.kept, shared.checkpoint) == (None, None, None)


@pytest.mark.parametrize("lanes, chunks", [(2, 4), (3, 6), (4, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "interleaved-zb"])
def test_a_link_is_a_number_or_a_dict_of_lanes_or_a_function_of_lanes(name, lanes, chunks):
    pairs = {(one, other): 2 for one in range(lanes) for other in range(lanes)}
    rows = [row_of(name, lanes, chunks, Costs(2, 2, 2, link=link))
            for link in (2, Link(latency=2), pairs, lambda sender, receiver: pairs[sender, receiver])]
    assert rows.count(rows[0]) == 4
    assert rows[0].makespan > row_of(name, lanes, chunks, Costs(2, 2, 2)).makespan


def test_a_list_of_links_is_between_neighbouring_lanes():
    assert row_of("interleaved", 2, 4, Costs(link=[3])) == row_of("interleaved", 2, 4, Costs(link=3))
    assert row_of("1f1b", 3, 6, Costs(link=[3, 3])) == row_of("1f1b", 3, 6, Costs(link=3))
    assert of_stages(Costs(link=[1, 4]), Placement.vee(3)).link == {(0, 1): 1, (1, 0): 1, (1, 2): 4, (2, 1): 4}


def test_what_a_list_says_nothing_about_is_a_reason():
    row = row_of("interleaved", 3, 6, Costs(link=[1, 2]))
    assert row.reason.startswith("link lists the ways between neighbouring lanes, but stage 2 on lane 2 sends to")
    assert row.makespan == inf
    row = row_of("interleaved", 3, 6, Costs(link=Link(bandwidth=1), message=[1, 2]))
    assert row.reason.startswith("message lists the sizes at 2 boundaries, but with 6 stages there are others")
    assert not row_of("1f1b", 3, 6, Costs(link=Link(bandwidth=1), message=[1, 2])).reason


@pytest.mark.parametrize("lanes", range(2, 7))
def test_a_schedule_that_is_not_defined_has_its_words_and_takes_for_ever(lanes):
    with pytest.raises(ScheduleError) as refused:
        by_name("zb-h2", lanes, 2 * lanes - 1)
    row = row_of("zb-h2", lanes, 2 * lanes - 1)
    assert row == Row("zb-h2", reason=str(refused.value))
    assert row.stages_per_lane == 0
    assert (row.makespan, row.bubble, row.span_bubble, row.peak_in_flight, row.peak_memory) == (inf,) * 5
    assert not row.fits(1e300) and not row.fits([9] * lanes) and not row.fits([])
    assert not row_of("zb-h2", lanes, 2 * lanes).reason


@pytest.mark.parametrize("names", ["1f1b", 3, True])
def test_names_that_are_no_list_are_refused(names):
    with pytest.raises(ScheduleError, match="names is .*. List names of schedules, such as"):
        compare(2, 4, names=names)


def test_rows_are_in_the_order_asked_for_and_by_default_of_all_names():
    assert [row.name for row in compare(2, 4)] == list(names())
    assert [row.name for row in compare(2, 4, names=iter(["zb-h1", "1f1b", "zb-h1"]))] == ["zb-h1", "1f1b", "zb-h1"]
    assert compare(2, 4, names=[]) == ()


def test_a_schedule_fits_where_no_lane_holds_more_than_its_cap():
    row = row_of("1f1b", 3, 6)
    assert row.memory == (3, 2, 1)
    assert row.fits(3) and not row.fits(2.999)
    assert row.fits((3, 2, 1)) and not row.fits((3, 2, 0.5)) and not row.fits([9, 1, 9])
    late = row_of("1f1b", 3, 6, Costs(activation=[1, 1, 5]))
    assert (late.memory, late.peak_memory) == ((3, 2, 5), 5) and late.fits(5) and not late.fits(4)
    many = row_of("gpipe", 1, 30, Costs(activation=0.1))
    assert many.peak_memory != 3 and many.fits(3)


def test_outputs_of_blocks_are_there_early_or_with_the_block():
    for name in names():
        schedule = by_name(name, 3, 6)
        early, late = (row_of(name, 3, 6, release=release).makespan for release in ("early", "block"))
        assert early <= late and (early < late or not schedule.blocks)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"names": ["1f1b", "1f1"]}, "there is no schedule '1f1'.* Did you mean '1f1b'"),
        ({"lanes": 0}, "lanes is 0, but must be a whole number of at least 1"),
        ({"chunks": 2.0}, "chunks is 2.0, but must be a whole number"),
        ({"costs": Costs(forward=[1, 2, 3])}, "forward lists 3 costs but there are 2 stages"),
        ({"costs": Costs(link=[1, 2])}, "link lists 2 costs but there are 1 boundaries"),
        ({"costs": Costs(kept=[1, 2])}, "kept is 2, but it is a part of the activations, which are 1"),
        ({"release": "late"}, "release is 'late'"),
        ({"costs": Costs(forward=lambda lane, chunk: -1)}, "forward is -"),
    ],
)
def test_what_is_wrong_for_every_schedule_is_refused(arguments, words):
    with pytest.raises(ScheduleError, match=words):
        compare(**{"lanes": 2, "chunks": 4, **arguments})


def test_caps_that_are_none_are_refused():
    with pytest.raises(ScheduleError, match=r"memory lists 2 numbers but there are 3 lanes \(memory: \(1, 2\)\)"):
        row_of("1f1b", 3, 3).fits((1, 2))
    with pytest.raises(ScheduleError, match="memory is -1"):
        row_of("1f1b", 3, 3).fits(-1)
