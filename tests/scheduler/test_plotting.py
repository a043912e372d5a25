"""Laws of figures: every action is a bar to scale, many actions are their shares of time, curves are what lanes hold.

They are read off matplotlib's own objects, not off a file."""

import sys
from fractions import Fraction
from itertools import pairwise
from xml.etree.ElementTree import fromstring

import numpy
import pytest
from cover import either, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from scheduler_strategies import schedules

from scheduler import Action, Costs, Event, Kind, Schedule, ScheduleError, Timeline, by_name, plot, simulate, svg

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(10))
PLAIN = {Kind.F: "#1f6fa8", Kind.B: "#6d1a36", Kind.I: "#e0806f", Kind.W: "#f0cd6e"}
IDLE, CURVE = "#eef0f2", "#c3cad4"


def patches(axes):
    """(colour, corners) of everything that is filled."""
    for collection in axes.collections:
        if isinstance(collection, PolyCollection):
            colours = collection.get_facecolor()
            for path in collection.get_paths():
                yield to_hex(colours[0]) if len(colours) else "none", path.vertices


def bars(axes):
    """(lane, left, right, colour) of each action's bar."""
    for colour, corners in patches(axes):
        if colour not in (IDLE, "none"):
            (left, top), (right, bottom) = corners.min(0), corners.max(0)
            assert bottom - top == pytest.approx(0.88)
            yield int(top), left, right, colour


def area(corners):
    x, y = corners.T
    return abs(numpy.dot(x, numpy.roll(y, 1)) - numpy.dot(y, numpy.roll(x, 1))) / 2


def words(figure):
    """All that is written, also on axes and legends."""
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text()]


def numbers(axes):
    return [text.get_text() for text in axes.texts if text.get_horizontalalignment() == "center"]


@LAWS
@given(schedules(), st.sampled_from([0, 1]), st.integers(400, 2000))
def test_every_action_is_one_bar_to_scale_on_its_lane_in_the_colour_of_its_kind(schedule, link, width):
    timeline = simulate(schedule, Costs(forward=1.5, link=link))
    lanes, _ = plot(timeline, width=width).axes
    drawn = sorted(bars(lanes))
    wanted = sorted((event.lane, event.start, event.end, event.action.kind) for event in timeline.events)
    assert len(drawn) == len(wanted)
    several = max(len(schedule.placement.stages_of(lane)) for lane in range(schedule.lanes)) > 1
    for (lane, left, right, colour), (host, start, end, kind) in zip(drawn, wanted, strict=True):
        assert (lane, left, right) == (host, pytest.approx(start), pytest.approx(end))
        assert several or colour == PLAIN[kind]


def test_several_stages_a_lane_have_shades_and_their_numbers():
    schedule = Schedule.parse("""
        schedule v, chunks 1, stages on lanes 0 1 1 0
        lane 0: 0F0 3F0 3B0 0B0
        lane 1: 1F0 2F0 2B0 1B0
    """)
    figure = plot(schedule, memory=False)
    fills = [colour for *_, colour in sorted(bars(figure.axes[0]))]
    assert fills[0] == fills[4] == PLAIN[Kind.F] != fills[1] == fills[5]
    assert "the later the stage, the paler" in words(figure)
    corners = [text.get_text() for text in figure.axes[0].texts if text.get_horizontalalignment() == "left"]
    assert sorted(corners) == sorted(2 * "0123")
    assert "the later the stage, the paler" not in words(plot(by_name("1f1b", 2, 2)))


@pytest.mark.parametrize("name, lanes, chunks", [("gpipe", 4, 8), ("1f1b", 1, 1), ("1f1b", 3, 10)])
def test_every_action_has_its_number_where_there_is_room(name, lanes, chunks):
    assert sorted(map(int, numbers(plot(by_name(name, lanes, chunks)).axes[0]))) == sorted(
        2 * lanes * list(range(chunks))
    )


def test_numbers_vanish_where_there_is_none():
    assert not numbers(plot(by_name("gpipe", 2, 128)).axes[0])
    assert len(numbers(plot(by_name("gpipe", 2, 128), width=9000).axes[0])) == 2 * 2 * 128


def test_the_legend_names_the_kinds_that_are_there():
    assert {"F forward", "B backward", "idle"} <= set(words(plot(by_name("1f1b", 2, 2))))
    split = words(plot(Schedule.parse("schedule s, chunks 1, stages on lanes 0\nlane 0: 0F0 0I0 0W0")))
    assert {"F forward", "I input gradient", "W weight gradient"} <= set(split) and "B backward" not in split


def test_a_block_is_outlined_from_its_first_start_to_its_last_end():
    schedule = Schedule.parse("""
        schedule s, chunks 2, stages on lanes 0 1
        lane 0: 0F0 0F1 0B0 0B1
        lane 1: 1F0 1F1+1B0 1B1
    """)
    figure = plot(schedule)
    (outline,) = [corners for colour, corners in patches(figure.axes[0]) if colour == "none"]
    timeline = simulate(schedule)
    first, second = timeline.by_lane[1][1:3]
    assert outline.min(0)[0] == pytest.approx(first.start) and outline.max(0)[0] == pytest.approx(second.end)
    assert "one block" in words(figure) and "one block" not in words(plot(timeline))


# ---- many actions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("lanes, chunks", [(4, 400), (7, 301)])
def test_where_actions_are_many_the_painted_area_is_their_time(name, lanes, chunks):
    timeline = simulate(by_name(name, lanes, chunks))
    figure = plot(timeline, memory=False)
    painted: dict[tuple[int, str], float] = {}
    for colour, corners in patches(figure.axes[0]):
        lane = int(corners.mean(0)[1])
        painted[lane, colour] = painted.get((lane, colour), 0.0) + area(corners) / 0.88
    for lane, row in enumerate(timeline.by_lane):
        for kind in {event.action.kind for event in row}:
            time = sum(event.end - event.start for event in row if event.action.kind is kind)
            assert painted[lane, PLAIN[kind]] == pytest.approx(time, rel=0.01)
    assert any("heights are shares of time, in columns of" in text for text in words(figure))
    assert not any("heights" in text for text in words(plot(by_name("gpipe", 4, 8))))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_many_actions_are_pixels_so_that_files_stay_small(name):
    assert len(svg(by_name(name, 8, either(1500, 4000)))) < 100_000


def test_a_wider_figure_shows_actions_one_by_one_again():
    schedule = by_name("gpipe", 2, 300)
    assert len(list(bars(plot(schedule, width=4000).axes[0]))) == 1200
    assert "heights are shares of time" in words(plot(schedule))[-1]


# ---- memory ----------------------------------------------------------------------------------------------------------


def curves(figure):
    """For each lane, where its steps begin and how high they are, as a share of the highest."""
    _, axes = figure.axes
    for lane, line in enumerate([line for line in axes.lines if line.get_drawstyle() == "steps-post"]):
        x, y = line.get_data()
        yield x, (lane + 0.95 - y) / 0.8


@LAWS
@given(schedules(), st.sampled_from([None, 1, 0]))
def test_curves_are_what_lanes_hold(schedule, kept):
    timeline = simulate(schedule, Costs(forward=1.5, activation=2, kept=kept))
    most = max(timeline.peak_memory)
    for (places, levels), steps in zip(curves(plot(timeline)), timeline.memory, strict=True):
        for half in range(int(2 * timeline.makespan)):
            time = half / 2 + 0.25
            held = next((level for at, level in reversed(steps) if at <= time), 0)
            drawn = next((level for x, level in zip(places[::-1], levels[::-1]) if x <= time), 0)
            assert drawn == pytest.approx(held / most)


def test_a_curve_of_many_steps_is_what_lanes_hold_too():
    timeline = simulate(by_name("1f1b", 3, 1000), Costs(link=1))
    most = max(timeline.peak_memory)
    for (places, levels), steps in zip(curves(plot(timeline)), timeline.memory, strict=True):
        held = dict(steps)  # the last of each time
        assert all(level == pytest.approx(held[at] / most) for at, level in zip(places[:-1], levels) if level < 1)


@pytest.mark.parametrize("lanes, chunks", [(2, 3), (4, 8), (4, 500), (40, 6)])
def test_maxima_are_marked_and_named(lanes, chunks):
    timeline = simulate(by_name("1f1b", lanes, chunks), Costs(activation=2.5))
    figure = plot(timeline)
    marks = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    for lane, (mark, peak) in enumerate(zip(marks, timeline.peak_memory, strict=True)):
        height = (lane + 0.95 - mark.get_ydata()[0]) / 0.8
        assert height == pytest.approx(peak / max(timeline.peak_memory), abs=0.01)
    assert {f"{peak:g}" for peak in timeline.peak_memory} <= set(words(figure))
    assert "held by each lane, and the maximum" in words(figure)


def test_a_curve_has_no_notch_where_one_chunk_goes_and_the_next_comes_at_once():
    for _, levels in list(curves(plot(by_name("1f1b", 4, 8))))[1:]:
        top = int(levels.argmax())
        assert all(low <= high for low, high in pairwise(levels[:top]))
        assert all(high >= low for high, low in pairwise(levels[top:]))


def test_memory_can_be_left_out():
    schedule = by_name("1f1b", 4, 8)
    assert "chunks held by each lane, and the maximum" in words(plot(schedule))
    with_memory, without = (plot(schedule, memory=memory) for memory in (True, False))
    assert len(with_memory.axes) == 2 and len(without.axes) == 1
    assert with_memory.get_figheight() > without.get_figheight() + 0.8


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [400, 500, 899, 1500])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipev"])
@pytest.mark.parametrize("memory", [True, False])
def test_nothing_that_is_written_leaves_the_page(name, width, memory):
    figure = plot(simulate(by_name(name, 3, 7), Costs(activation=1234567890)), width=width, memory=memory)
    FigureCanvasAgg(figure).draw()
    lanes = figure.axes[0]
    held = [text for axes in figure.axes[1:] for text in axes.texts]
    written = [*figure.texts, *held, *lanes.get_legend().get_texts(), *lanes.get_yticklabels(), lanes.xaxis.label]
    for text in written:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text.get_text()


@pytest.mark.parametrize("lanes", either([1, 40], [1, 16, 64, 100]))
def test_names_of_lanes_do_not_touch(lanes):
    figure = plot(by_name("gpipe", lanes, 2))
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        labels = axes.get_yticklabels()
        assert [label.get_text() for label in labels] == [f"lane {lane}" for lane in range(lanes)]
        boxes = [label.get_window_extent() for label in labels]
        assert all(upper.y0 >= lower.y0 + 8 for upper, lower in pairwise(boxes))


def test_the_footer_says_makespan_both_bubbles_and_peaks():
    line = "makespan 33 slots, bubble 27.3% (flush), 27.3% (span), peak in flight 8 8 8 8"
    assert line in words(plot(by_name("gpipe", 4, 8)))
    assert any(text.endswith("peak in flight 1 to 17") for text in words(plot(by_name("1f1b", 17, 20))))
    events = (Event(Action.parse("0F0"), 0, 0, 1), Event(Action.parse("1F0"), 1, 1, 2))
    assert any("bubble 50.0% (flush), 0.0% (span)" in text for text in words(plot(Timeline(events, 2))))


@pytest.mark.parametrize("title", ["a < b & c > \"d\"", "größer", "", "tab\tand\0nul\ud800"])
def test_titles_are_text_and_the_picture_is_a_file_of_its_own(title):
    root = fromstring(svg(by_name("gpipe", 2, 2), title=title))
    shown = "".join(filter(str.isprintable, title))
    written = {"".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert not shown or shown in written
    links = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)


def test_a_schedule_is_named_and_a_timeline_is_not():
    schedule = by_name("gpipe", 2, 3)
    assert "gpipe: 2 lanes, 3 chunks" in words(plot(schedule))
    assert not any("gpipe" in text for text in words(plot(simulate(schedule))))


@pytest.mark.parametrize("seconds, unit", [(12.0, " s"), (1.5, " s"), (0.9, " ms"), (0.002, " ms"), (0.0009, " µs")])
def test_a_measured_timeline_has_an_axis_in_a_unit_that_fits(seconds, unit):
    timeline = Timeline.measured([Event(Action.parse("0F0"), 0, 3.0, 3.0 + seconds)], 2)
    figure = plot(timeline, memory=False)
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    assert axes.get_xlim() == (0, pytest.approx(seconds))
    assert axes.get_xticklabels()[-2].get_text().endswith(unit)


@LAWS
@given(schedules())
def test_the_same_schedule_gives_the_same_text(schedule):
    assert svg(schedule) == svg(Schedule.parse(str(schedule)))


def test_svg_is_drawn_in_the_default_style_and_leaves_the_users_as_it_is():
    import matplotlib

    plain = svg(by_name("gpipe", 2, 2))
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.fonttype": "path"}):
        assert svg(by_name("gpipe", 2, 2)) == plain
        assert matplotlib.rcParams["lines.linewidth"] == 9


@pytest.mark.parametrize(
    "timeline", [Timeline((), 2), Timeline((), 1, "s"), simulate(by_name("gpipe", 2, 2), Costs(0, 0, 0))]
)
def test_nothing_and_no_time_are_drawn_too(timeline):
    figure = plot(timeline)
    assert any(text.startswith("makespan 0 ") for text in words(figure))
    assert len(list(bars(figure.axes[0]))) == len(timeline.events)


@pytest.mark.parametrize("chunks", [4, 500])
def test_fractions_are_drawn_as_floats_are(chunks):
    numbers = dict(forward=0.25, input=0.5, weight=0.75, activation=1.5, kept=0.5)
    exact = {name: Fraction(number) for name, number in numbers.items()}
    texts = {svg(simulate(by_name("zb-h1", 2, chunks), Costs(**costs))) for costs in (numbers, exact)}
    assert len(texts) == 1


def test_a_lane_that_runs_nothing_is_left_white_where_actions_are_many():
    events = [event for event in simulate(by_name("gpipe", 2, 500)).events if event.lane == 0]
    axes = plot(Timeline(tuple(events), 2), memory=False).axes[0]
    painted = [corners for colour, corners in patches(axes) if colour == PLAIN[Kind.F] and area(corners) > 1e-9]
    assert {int(corners.mean(0)[1]) for corners in painted} == {0}


@pytest.mark.parametrize("orders", ["lane 0: 0F0 0F1\nlane 1: 1F0 1F1", "lane 0: 0F0 0F1\nlane 1:"])
def test_half_a_schedule_is_drawn(orders):
    schedule = Schedule.parse(f"schedule half, chunks 2, stages on lanes 0 1\n{orders}")
    assert len(list(bars(plot(schedule).axes[0]))) == len(schedule.actions)


def test_what_goes_back_without_having_come_holds_less_than_nothing_and_is_drawn_as_nothing():
    actions = [("0B0", 0), ("0F0", 5), ("0F1", 7)]
    timeline = Timeline(tuple(Event(Action.parse(text), 0, at, at + 1) for text, at in actions), 1)
    ((_, levels),) = curves(plot(timeline))
    assert min(levels) == pytest.approx(0) and max(levels) > 0


@pytest.mark.parametrize("width", [399, 0, -5, 300.5, True, "960"])
@pytest.mark.parametrize("draws", [plot, svg])
def test_a_width_that_leaves_no_room_is_refused(width, draws):
    with pytest.raises(ScheduleError, match="width is .*, but must be a whole number of at least 400"):
        draws(by_name("gpipe", 2, 2), width=width)


def test_a_schedule_that_cannot_end_is_refused():
    with pytest.raises(ScheduleError, match="lane 0 waits at 0B0 for 0F0"):
        svg(Schedule.parse("schedule wrong, chunks 1, stages on lanes 0\nlane 0: 0B0 0F0"))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pictures need matplotlib: pip install "penstock-torch\[plots\]"'):
        plot(by_name("gpipe", 2, 2))
