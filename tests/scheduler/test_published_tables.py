"""Do the schedules have the bubbles that their papers print?

The papers count idle time in the span of a lane (`span_bubble`): first start to last end. For 1F1B, interleaved 1F1B
and ZB-H1 that of the first lane is the whole step, so both rates are one; for ZB-H2 they are not.
"""

from functools import cache
from typing import NamedTuple

import pytest

from scheduler import Costs, Kind, by_name, requires, simulate


class Row(NamedTuple):
    """Profiles in microseconds and Table 5 of Qi et al. 2023 (arXiv 2401.10241); `loop` is interleaved 1F1B."""

    layers: int
    lanes: int
    chunks: int
    forward: int
    input: int
    weight: int
    link: int
    one: float
    loop_printed: float
    loop_in_full: float
    h1: float
    h2: float

    def costs(self, stages_per_lane=1):
        """Times of a stage; scaled by the stages a lane, links too, so that they stay whole and rates the same."""
        return Costs(self.forward, self.input, self.weight, link=self.link * stages_per_lane)


TABLE = [
    Row(24, 8, 24, 18522, 18086, 9337, 601, .2431, .1055, .1090, .1585, .1083),
    Row(24, 8, 32, 18513, 18086, 9331, 626, .1985, .0818, .0847, .1242, .0837),
    Row(24, 8, 64, 18546, 18097, 9321, 762, .1240, .0443, .0461, .0674, .0444),
    Row(32, 8, 24, 29718, 29444, 19927, 527, .2347, .0808, .0827, .1323, .0698),
    Row(32, 8, 32, 29802, 29428, 19530, 577, .1898, .0628, .0644, .1045, .0559),
    Row(32, 8, 64, 29935, 29621, 19388, 535, .1091, .0320, .0328, .0554, .0294),
    Row(48, 16, 48, 11347, 11248, 8132, 377, .2552, .1104, .1136, .1397, .0672),
    Row(48, 16, 64, 11307, 11254, 8101, 379, .2082, .0852, .0878, .1088, .0516),
    Row(48, 16, 128, 11325, 11308, 8109, 378, .1251, .0445, .0459, .0576, .0266),
    Row(64, 32, 96, 10419, 10207, 7715, 408, .2646, .1493, .1528, .1421, .0641),
    Row(64, 32, 128, 10408, 10204, 7703, 408, .2168, .1164, .1192, .1106, .0490),
    Row(64, 32, 256, 10402, 10248, 7698, 460, .1352, .0624, .0641, .0594, .0257),
]
rows = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.layers}-layers-{row.lanes}x{row.chunks}")


def to_4_digits(value):
    return pytest.approx(value, abs=5.001e-5)  # half of the last digit; a hair more, where it is on the edge


@cache
def timeline(name, row):
    return simulate(by_name(name, row.lanes, row.chunks), row.costs())


@rows
@pytest.mark.parametrize("name, column", [("1f1b", "one"), ("zb-h1", "h1"), ("zb-h2", "h2")])
def test_bubbles_of_1f1b_zb_h1_and_zb_h2_are_those_of_table_5(name, column, row):
    assert timeline(name, row).span_bubble == to_4_digits(getattr(row, column))


@rows
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_span_of_1f1b_and_zb_h1_is_the_whole_step(name, row):
    assert timeline(name, row).bubble == timeline(name, row).span_bubble


@rows
def test_zb_h2_idles_lanes_minus_1_times_f_plus_i_plus_two_hops_minus_twice_w_in_its_span(row):
    """The authors' script asserts it for each of these profiles."""
    work = row.chunks * (row.forward + row.input + row.weight)
    idle = (row.lanes - 1) * (row.forward + row.input + 2 * row.link - 2 * row.weight)
    assert timeline("zb-h2", row).span_bubble == pytest.approx(idle / (work + idle), abs=1e-12)


@rows
def test_1f1b_with_links_takes_longer_than_gpipe_and_eager_1f1b_does_not(row):
    """Section 2.5: every turn of 1F1B waits for a message there and back."""
    one, eager, first_all = (timeline(name, row).makespan for name in ("1f1b", "eager-1f1b", "gpipe"))
    t = row.forward + row.input + row.weight
    assert eager == first_all == row.chunks * t + (row.lanes - 1) * (t + 2 * row.link) < one


@pytest.mark.parametrize("row, gpipe", [(TABLE[5], .0998), (TABLE[2], .1015), (TABLE[11], .1111)])
def test_gpipe_and_eager_1f1b_have_the_bubbles_of_section_2_5(row, gpipe):
    assert timeline("gpipe", row).bubble == timeline("eager-1f1b", row).bubble == to_4_digits(gpipe)


@rows
def test_interleaved_has_the_bubble_that_its_dependencies_give_and_not_the_printed_one(row):
    """The printed column leaves out that a chunk's next stage on the first lane waits for the last lane, and on the
    way back the last for the first, but for the first chunk of each `lanes`: so reads `get_interleave_schedule` of the
    authors' efficiency.py. Without that it is met to 4 digits, and with it the column is larger."""
    v = row.layers // row.lanes
    schedule, costs = by_name("interleaved", row.lanes, row.chunks, stages_per_lane=v), row.costs(v)
    in_full = simulate(schedule, costs)
    assert in_full.bubble == to_4_digits(row.loop_in_full)
    assert slowly(schedule, costs, requires) == in_full.makespan

    def as_printed(action, stages):
        return [need for need in requires(action, stages) if not left_out(action, need)]

    def left_out(action, need):
        wraps = need.stage != action.stage and min(need.stage, action.stage) % row.lanes == row.lanes - 1
        return wraps and action.chunk % row.lanes

    busy = row.chunks * v * (row.forward + row.input + row.weight)
    assert 1 - busy / slowly(schedule, costs, as_printed) == to_4_digits(row.loop_printed)


def slowly(schedule, costs, needs_of):
    """The makespan, where actions wait for what `needs_of` says: one sweep over the lanes after the other."""
    left, free, ends = [list(reversed(order)) for order in schedule.orders], [0] * schedule.lanes, {}
    while any(left):
        for lane, order in enumerate(left):
            while order and all(need in ends for need in needs_of(order[-1], schedule.stages)):
                action = order.pop()
                arrivals = [
                    ends[need] + (costs.link if need.stage != action.stage else 0)
                    for need in needs_of(action, schedule.stages)
                ]
                free[lane] = ends[action] = max([free[lane], *arrivals]) + duration(action, costs)
    return max(free)


def duration(action, costs):
    return costs.forward if action.kind is Kind.F else costs.input + costs.weight


def test_slowly_is_the_machine_of_simulate():
    schedule, costs = by_name("interleaved", 3, 7), Costs(3, 2, 2, link=1)
    assert slowly(schedule, costs, requires) == simulate(schedule, costs).makespan
    assert slowly(schedule, costs, lambda action, stages: ()) == 7 * 2 * (3 + 2 + 2)


# Section 2.3: F, I and W take the same, no hops. (lanes, chunks): bubble, and the peak in whole shares of a lane.
WORKED = {
    "gpipe": {
        (4, 8): (.2727, 8), (4, 16): (.1579, 16), (4, 64): (.0448, 64),
        (8, 8): (.4667, 8), (8, 16): (.3043, 16), (8, 64): (.0986, 64),
        (16, 8): (.6522, 8), (16, 16): (.4839, 16), (16, 64): (.1899, 64),
    },
    "1f1b": {
        (4, 8): (.2727, 4), (4, 16): (.1579, 4), (4, 64): (.0448, 4),
        (8, 8): (.4667, 8), (8, 16): (.3043, 8), (8, 64): (.0986, 8),
        (16, 8): (.6522, 8), (16, 16): (.4839, 16), (16, 64): (.1899, 16),
    },
    "interleaved": {
        (4, 8): (.1579, 5.5), (4, 16): (.0857, 5.5), (4, 64): (.0229, 5.5),
        (8, 8): (.3043, 8), (8, 16): (.1795, 11.5), (8, 64): (.0519, 11.5),
        (16, 8): (.5897, 8), (16, 16): (.3191, 16), (16, 64): (.1049, 23.5),
    },
    "zb-h1": {
        (4, 8): (.1111, 4), (4, 16): (.0588, 4), (4, 64): (.0154, 4),
        (8, 8): (.2258, 8), (8, 16): (.1273, 8), (8, 64): (.0352, 8),
        (16, 8): (.4894, 8), (16, 16): (.2381, 16), (16, 64): (.0725, 16),
    },
    "zb-h2": {  # with a barrier; without, no lane idles
        (4, 8): (.1111, 7), (4, 16): (.0588, 7), (4, 64): (.0154, 7),
        (8, 16): (.1273, 15), (8, 64): (.0352, 15), (16, 64): (.0725, 31),
    },
    "interleaved-zb": {
        (4, 8): (.0588, 4), (4, 16): (.0303, 4), (4, 64): (.0078, 4),
        (8, 8): (.1273, 8), (8, 16): (.0680, 8), (8, 64): (.0179, 8),
        (16, 8): (.3924, 8), (16, 16): (.1351, 16), (16, 64): (.0376, 16),
    },
}


@pytest.mark.parametrize("name, lanes, chunks", [(name, *size) for name, sizes in WORKED.items() for size in sizes])
def test_bubble_and_peak_are_the_worked_values(name, lanes, chunks):
    schedule = by_name(name, lanes, chunks)
    result = simulate(schedule)
    bubble, peak = WORKED[name][lanes, chunks]
    assert result.bubble == to_4_digits(bubble)
    assert max(result.peak_in_flight) / (schedule.stages // lanes) == peak
    assert name != "zb-h2" or result.span_bubble == 0
