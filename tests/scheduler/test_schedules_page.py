"""Does docs/schedules.md tell the truth: what is made on it, and what it says of all orders there could be?

Formulas of bubbles and memory are held where the schedules are tested (test_loop_schedules.py, test_vee_schedules.py).
Here are the words around them: "no order takes less", "holds less", "costs 1F1B more".
"""

import importlib.util
import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path

import pytest

from scheduler import Costs, Placement, by_name, names, simulate, verify
from scheduler.__main__ import main
from scheduler.comparison import compare

DOCS = Path(__file__).parents[2] / "docs"
PAGE, GLOSSARY = ((DOCS / name).read_text() for name in ("schedules.md", "glossary.md"))

spec = importlib.util.spec_from_file_location("make_schedules", DOCS / "make_schedules.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


# --------------------------------------------------------------------------------------------------- what is made


def test_the_pages_are_what_is_made_now():
    assert [PAGE, GLOSSARY] == [make.remade(PAGE), make.remade(GLOSSARY)], "run python docs/make_schedules.py"


def test_the_figures_are_what_is_made_now_and_the_pages_show_them_all():
    made = dict([*make.figures(PAGE), *make.figures(GLOSSARY)])
    assert {file.name: file.read_text() for file in (DOCS / "schedules").iterdir()} == made, "as above"


def test_every_schedule_has_a_section_a_grid_a_figure_and_a_row():
    for name in names():
        assert f"\n### {name}\n" in PAGE
        assert re.search(rf"^<!-- made: grid {name} ", PAGE, re.MULTILINE)
        assert f"\n![{name}, " in PAGE
        assert len(re.findall(rf"^\| {name} \|", PAGE, re.MULTILINE)) >= 2


def test_the_commands_of_the_page_run(capsys):
    commands = re.findall(r"^penstock schedules (.*)$", PAGE, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert main(command.split()) == 0
        shown = capsys.readouterr()
        assert shown.out and not shown.err


def test_what_is_between_markers_does_not_survive():
    stale = PAGE.replace("| 1f1b | 1 | whole |", "| 1f1b | 2 | whole |")
    assert stale != PAGE == make.remade(stale)
    assert make.remade("<!-- made: figure 1f1b 4 8 -->\n<!-- end -->") == (
        "<!-- made: figure 1f1b 4 8 -->\n![1f1b, 4 lanes, 8 chunks](schedules/1f1b.svg)\n<!-- end -->"
    )


# ------------------------------------------------------------------------------- what no order of any kind can beat

WHOLE, SPLIT = (1, 2), (1, 1, 1)


def can_end_in(time, placement, chunks, durations, cap=inf):
    """Whether any order does; F and B take `durations`, or F, I and W. No lane holds more than `cap`.

    Tries everything that lanes can begin in each slot, to wait included. Chunks are alike: how many have begun each
    piece of work is all that counts, because the first to come may as well be the first to go on.
    """
    stages = range(placement.stages)
    works = [*((stage, 0) for stage in stages), *((stage, 1) for stage in reversed(stages))]  # the way of a chunk
    needs = [None, *range(len(works) - 1)]
    for stage in stages if len(durations) == 3 else ():
        needs.append(works.index((stage, 1)))
        works.append((stage, 2))
    of_lane = [[at for at, (stage, _) in enumerate(works) if placement.lane_of[stage] == lane]
               for lane in range(placement.lanes)]
    first, last = ([works.index((stage, kind)) for stage in stages] for kind in (0, len(durations) - 1))

    def done(begun, running, at):
        return begun[at] - any(at == other for other, _ in running)

    def may_begin(begun, running, lane, at):
        if begun[at] == chunks or (needs[at] is not None and done(begun, running, needs[at]) <= begun[at]):
            return False
        hosted = [stage for stage in stages if placement.lane_of[stage] == lane]
        held = sum(begun[first[stage]] - done(begun, running, last[stage]) for stage in hosted)
        return works[at][1] > 0 or held < cap

    def choices(begun, running, lane):
        if running[lane] != IDLE:
            return [running[lane]]
        free = [at for at in of_lane[lane] if may_begin(begun, running, lane, at)]
        return [IDLE, *((at, durations[works[at][1]]) for at in free)]

    def left(begun, running, lane):
        return running[lane][1] + sum((chunks - begun[at]) * durations[works[at][1]] for at in of_lane[lane])

    def after(begun, running):
        for chosen in product(*(choices(begun, running, lane) for lane in range(placement.lanes))):
            new = list(begun)
            for lane, (at, _) in enumerate(chosen):
                if chosen[lane] != running[lane]:
                    new[at] += 1
            yield tuple(new), tuple((at, more - 1) if more > 1 else IDLE for at, more in chosen)

    level = {((0,) * len(works), (IDLE,) * placement.lanes)}
    for more in range(time, 0, -1):
        level = {state for begun, running in level for state in after(begun, running)
                 if all(left(*state, lane) < more for lane in range(placement.lanes))}
    return bool(level)


IDLE = -1, 0


def least_time(name, lanes, chunks, durations, **options):
    """The time of this schedule, after a look at all others."""
    schedule = by_name(name, lanes, chunks, **options)
    costs = Costs(durations[0], backward=durations[1]) if len(durations) == 2 else Costs(*durations)
    time = simulate(schedule, costs).makespan
    assert can_end_in(time, schedule.placement, chunks, durations)
    assert not can_end_in(time - 1, schedule.placement, chunks, durations)
    return time


@pytest.mark.parametrize("time", [4, 5, 6])
def test_can_end_in_knows_what_one_chunk_and_one_lane_take(time):
    assert can_end_in(time, Placement.linear(1), 1, (2, 3)) == (time >= 5)
    assert can_end_in(time, Placement.linear(1), 2, (1, 1, 1)) == (time >= 6)
    assert can_end_in(time, Placement.linear(1), 2, (1, 1, 1), cap=1) == (time >= 6)
    assert can_end_in(time, Placement.vee(1), 1, (1, 2)) == (time >= 6)
    assert can_end_in(time, Placement.linear(2), 1, (1, 1, 1)) == (time >= 5)  # the last W of one lane waits for nobody
    assert not can_end_in(time, Placement.linear(1), 1, (1, 1), cap=0)


@pytest.mark.parametrize("durations", [WHOLE, (1, 1), (2, 3)])
@pytest.mark.parametrize("lanes, chunks", [(1, 2), (2, 1), (2, 5), (3, 2), (3, 4), (4, 3)])
def test_no_order_of_whole_backwards_with_one_stage_a_lane_takes_less_than_1f1b(lanes, chunks, durations):
    assert least_time("1f1b", lanes, chunks, durations) == (chunks + lanes - 1) * sum(durations)


@pytest.mark.parametrize("lanes, chunks", [(2, 2), (2, 6), (3, 3), (3, 5), (4, 4)])
def test_with_as_many_chunks_as_lanes_no_order_as_fast_as_1f1b_holds_less(lanes, chunks):
    time = simulate(by_name("1f1b", lanes, chunks)).makespan
    assert can_end_in(time, Placement.linear(lanes), chunks, WHOLE, cap=lanes)
    assert not can_end_in(time, Placement.linear(lanes), chunks, WHOLE, cap=lanes - 1)


@pytest.mark.parametrize("durations", [WHOLE, (1, 1), (2, 3)])
@pytest.mark.parametrize("lanes, chunks, v", [(2, 1, 2), (2, 3, 2), (2, 4, 2), (3, 2, 2), (3, 3, 2), (2, 2, 3)])
def test_no_order_of_whole_backwards_on_a_loop_takes_less_than_interleaved_and_looped_bfs(lanes, chunks, v, durations):
    time = least_time("interleaved", lanes, chunks, durations, stages_per_lane=v)
    assert time == least_time("looped-bfs", lanes, chunks, durations, stages_per_lane=v)


def test_orders_on_a_loop_exist_that_take_as_long_as_interleaved_and_hold_less():
    timeline = simulate(by_name("interleaved", 2, 4))
    assert can_end_in(timeline.makespan, Placement.loop(2, 4), 4, WHOLE, cap=max(timeline.peak_in_flight) - 1)


@pytest.mark.parametrize("name, sizes", [
    ("zb-h1", [(1, 2), (2, 2), (2, 5), (3, 3), (3, 4)]),
    ("interleaved-zb", [(2, 2), (2, 3), (3, 3)]),
    ("zb-v", [(1, 2), (2, 2), (2, 3), (3, 3)]),
])
def test_with_as_many_chunks_as_lanes_and_equal_times_no_order_takes_less_than(name, sizes):
    for lanes, chunks in sizes:
        least_time(name, lanes, chunks, SPLIT)


# ---------------------------------------------------------------------------------------------- memory and messages


@pytest.mark.parametrize("name", [name for name in names() if by_name(name, 4, 8).split])
def test_what_i_frees_does_not_lower_the_peak_of_the_fullest_lane(name):
    for lanes, more in product(range(1, 9), (0, 1, 5)):
        full, part, none = (compare(lanes, 2 * lanes + more, Costs(kept=kept), [name])[0] for kept in (1, 0.5, 0))
        assert full.peak_memory == part.peak_memory == none.peak_memory


def test_interleaved_zb_holds_less_than_interleaved_where_lanes_divide_chunks():
    for lanes, rounds in product(range(2, 9), (2, 3)):
        whole, split = compare(lanes, rounds * lanes, names=["interleaved", "interleaved-zb"])
        assert split.peak_in_flight == lanes < whole.peak_in_flight


def test_zb_v_is_as_fast_as_dualpipev_and_holds_less():
    for lanes, more in product(range(1, 9), (0, 1, 5)):
        pair, alone = compare(lanes, 2 * lanes + more, names=["dualpipev", "zb-v"])
        assert alone.bubble == pytest.approx(pair.bubble) and alone.peak_in_flight < pair.peak_in_flight


def test_schedules_for_little_memory_hold_less_the_further_down_the_page():
    for lanes in range(4, 9):
        rows = compare(lanes, 4 * lanes, names=["1f1b", "v-half", "v-min"])
        peaks = [row.peak_in_flight for row in rows]
        assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[1]


FREE = replace(make.PROFILE, link=0)
T = FREE.forward + FREE.input + FREE.weight


@cache
def profiled(costs):
    return {row.name: row for row in compare(*make.PROFILED, costs)}


def test_messages_cost_1f1b_almost_3_percent_of_its_step_and_gpipe_a_third_of_one():
    more = {name: profiled(make.PROFILE)[name].makespan - profiled(FREE)[name].makespan for name in ("1f1b", "gpipe")}
    assert 0.025 < more["1f1b"] / profiled(make.PROFILE)["1f1b"].makespan < 0.03
    assert more["gpipe"] == pytest.approx((make.PROFILED[0] - 1) * 2 * make.PROFILE.link)
    assert more["gpipe"] / profiled(make.PROFILE)["gpipe"].makespan < 0.0034
    assert make.PROFILE.link / T == pytest.approx(0.017, abs=5e-4)


def test_two_chunks_more_get_nearly_all_of_it_back_and_three_all():
    rows = [row.split(" | ") for row in make.warmup().splitlines()[2:]]
    steps, peaks = [float(row[1]) for row in rows], [int(row[3].split()[0]) for row in rows]
    assert peaks == [8, 9, 10, 11]
    gpipe = profiled(make.PROFILE)["gpipe"].makespan
    assert steps[0] - gpipe > 80 and steps[2] - gpipe < 1 and steps[3] == pytest.approx(gpipe, abs=0.05)


def test_the_patterns_of_v_min_and_1f1b_v_do_not_fit_the_profile_and_v_half_is_ahead_of_1f1b():
    rows = profiled(make.PROFILE)
    assert min(rows["v-min"].bubble, rows["1f1b-v"].bubble) > 2 * rows["1f1b"].bubble
    assert rows["v-half"].makespan < rows["1f1b"].makespan

    def idle_for_a_chunk(name):
        less, more = (compare(8, chunks, FREE, [name])[0] for chunks in (64, 128))
        return (more.makespan * more.bubble - less.makespan * less.bubble) / 64

    assert idle_for_a_chunk("1f1b") == pytest.approx(0, abs=1e-9)
    assert min(idle_for_a_chunk("v-min"), idle_for_a_chunk("1f1b-v")) > 0.15 * T


def test_every_schedule_of_the_page_is_right_at_the_sizes_of_the_page():
    for name in names():
        for size in make.SIZES:
            verify(by_name(name, *size))
