import re
from bisect import bisect_left, bisect_right
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules

from scheduler import Action, Costs, Event, Kind, Schedule, ScheduleError, Timeline, by_name, simulate
from scheduler.figures.axis import ticks
from scheduler.figures.figure import svg
from scheduler.figures.frame import Frame
from scheduler.figures.palette import IDLE_COLOUR, colour

LAWS = settings(derandomize=True, deadline=None, max_examples=50)
SVG = "{http://www.w3.org/2000/svg}"


def elements(text, tag):
    return list(fromstring(text).iter(SVG + tag))


def texts(text):
    return [element.text for element in elements(text, "text")]


def cells(text):
    """The rectangle of each action, by the words of its tooltip."""
    named = [(element.find(SVG + "title"), element) for element in elements(text, "rect")]
    return {title.text.split(" ", 1)[0]: element for title, element in named if title is not None}


def box(element):
    return [float(element.get(name)) for name in ("x", "y", "width", "height")]


def outline(path):
    """The steps of an area, (x, height above its base) each, and its right end."""
    moves = re.findall(r"([MHV])([-\d.]+)(?: ([-\d.]+))?", path)
    base, x, level, steps = float(moves[0][2]), float(moves[0][1]), 0.0, []
    for letter, number, _ in moves[1:]:
        if letter == "H":
            steps.append((x, level))
            x = float(number)
        else:
            level = base - float(number)
    return [*steps, (x, level)]


def area(path):
    steps = outline(path)
    return sum((after[0] - x) * level for (x, level), after in zip(steps, steps[1:]))


@LAWS
@given(schedules(), st.sampled_from([0, 1]), st.integers(300, 2000))
def test_every_action_is_one_rectangle_to_scale_on_its_lane_in_the_colour_of_its_kind(schedule, link, width):
    timeline = simulate(schedule, Costs(forward=1.5, link=link))
    frame = Frame(timeline.lanes, timeline.makespan, width)
    found = cells(svg(timeline, width=width))
    assert len(found) == len(timeline.events)
    most = max(len(schedule.placement.stages_of(lane)) for lane in range(schedule.lanes))
    tops = sorted({box(element)[1] for element in found.values()})
    for action, lane, start, end in timeline.events:
        x, y, wide, high = box(found[str(action)])
        assert x == pytest.approx(frame.left + frame.plot * start / timeline.makespan, abs=0.01)
        assert x + wide == pytest.approx(frame.left + frame.plot * end / timeline.makespan, abs=0.02)
        assert y == tops[lane] and high == frame.row
        stages = schedule.placement.stages_of(lane)
        assert found[str(action)].get("fill") == colour(action.kind, stages.index(action.stage), most)
    assert all(high >= low + frame.row for low, high in zip(tops, tops[1:]))


@LAWS
@given(schedules())
def test_the_same_schedule_gives_the_same_bytes(schedule):
    assert svg(schedule) == svg(Schedule.parse(str(schedule)))


def test_tooltips_say_action_lane_and_times():
    title = cells(svg(by_name("1f1b", 4, 8)))["2B3"].find(SVG + "title").text
    assert title == "2B3 on lane 2, from 15 slots to 17 slots"
    measured = Timeline.measured([Event(Action.parse("0F0"), 0, 7.0, 7.0042)], 1)
    assert cells(svg(measured))["0F0"].find(SVG + "title").text == "0F0 on lane 0, from 0 s to 4.2 ms"


def numbers(picture):
    """What is written on rectangles."""
    groups = [group for group in elements(picture, "g") if group.get("text-anchor") == "middle"]
    return [text for group in groups if group.get("fill") is None for text in group]


@pytest.mark.parametrize("name, lanes, chunks", [("gpipe", 4, 8), ("1f1b", 1, 1), ("1f1b", 3, 10)])
def test_every_action_has_its_number_where_there_is_room(name, lanes, chunks):
    written = [text.text for text in numbers(svg(by_name(name, lanes, chunks)))]
    assert sorted(map(int, written)) == sorted(2 * lanes * list(range(chunks)))


def test_numbers_vanish_where_there_is_none():
    assert not numbers(svg(by_name("gpipe", 16, 64)))
    assert len(numbers(svg(by_name("gpipe", 16, 64), width=3000))) == 2 * 16 * 64


@pytest.mark.parametrize("lanes, chunks", [(1, 1), (2, 12), (4, 8), (4, 30), (8, 20)])
def test_numbers_stay_inside_their_rectangles(lanes, chunks):
    picture = svg(by_name("1f1b", lanes, chunks))
    boxes = list(map(box, cells(picture).values()))
    for text in numbers(picture):
        x, y, half = float(text.get("x")), float(text.get("y")), 0.29 * float(text.get("font-size")) * len(text.text)
        assert any(left <= x - half and x + half <= left + wide and top < y < top + high
                   for left, top, wide, high in boxes)


def test_several_stages_a_lane_have_shades_and_their_numbers():
    picture = svg(Schedule.parse("""
        schedule v, chunks 1, stages on lanes 0 1 1 0
        lane 0: 0F0 3F0 3B0 0B0
        lane 1: 1F0 2F0 2B0 1B0
    """), memory=False)
    assert "the later the stage, the paler" in texts(picture)
    fills = {name: element.get("fill") for name, element in cells(picture).items()}
    assert fills["0F0"] == fills["1F0"] != fills["2F0"] == fills["3F0"]
    stages = [element.text for element in elements(picture, "text") if element.get("font-size") == "6"]
    assert sorted(stages) == sorted(2 * "0123")
    assert "the later the stage, the paler" not in texts(svg(by_name("1f1b", 2, 2)))


def test_the_legend_names_the_kinds_that_are_there():
    assert {"F forward", "B backward", "idle"} <= set(texts(svg(by_name("1f1b", 2, 2))))
    split = texts(svg(Schedule.parse("schedule s, chunks 1, stages on lanes 0\nlane 0: 0F0 0I0 0W0")))
    assert {"F forward", "I input gradient", "W weight gradient"} <= set(split) and "B backward" not in split


def test_a_block_is_outlined_from_its_first_start_to_its_last_end():
    schedule = Schedule.parse("""
        schedule s, chunks 2, stages on lanes 0 1
        lane 0: 0F0 0F1 0B0 0B1
        lane 1: 1F0 1F1+1B0 1B1
    """)
    picture = svg(schedule)
    swatch, outlined = [element for element in elements(picture, "rect") if element.get("stroke") == "#111111"]
    first, second = box(cells(picture)["1F1"]), box(cells(picture)["1B0"])
    assert box(outlined) == pytest.approx([first[0], first[1], first[2] + second[2], first[3]], abs=0.02)
    assert "one block" in texts(picture) and "one block" not in texts(svg(simulate(schedule)))


# ---- many actions ----------------------------------------------------------------------------------------------------

def densities(picture):
    """For each lane, the paths from the top kind to the lowest."""
    groups = [group for group in elements(picture, "g") if group.find(SVG + "path") is not None
              and group.find(SVG + "title") is not None]
    return [[path for path in group.iter(SVG + "path")] for group in groups]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("lanes, chunks", [(4, 400), (7, 301), (20, 256)])
def test_where_actions_are_many_the_painted_area_is_their_time(name, lanes, chunks):
    timeline = simulate(by_name(name, lanes, chunks))
    frame = Frame(lanes, timeline.makespan, 960)
    picture = svg(timeline, memory=False)
    assert not cells(picture)
    full = frame.plot * frame.row
    for lane, paths in enumerate(densities(picture)):
        assert [path.get("fill") for path in paths] == [colour(kind) for kind in ("B", "F")]
        shares = [area(path.get("d")) / full * timeline.makespan for path in paths]
        assert shares == pytest.approx([timeline.busy[lane], chunks], rel=0.005)
    assert len(densities(picture)) == lanes


def test_where_actions_are_many_the_figure_says_how_it_is_to_be_read():
    picture = svg(by_name("gpipe", 4, 400))
    assert any("heights are shares of time, in columns of 5.65 slots" in text for text in texts(picture))
    assert "F 400, B 400" not in texts(picture)
    assert [title.text for title in elements(picture, "title")][1] == "400 F, 400 B"
    assert not any("heights" in text for text in texts(svg(by_name("gpipe", 4, 8))))


def test_where_actions_are_many_the_legend_has_neither_shades_nor_blocks():
    lane = " ".join(f"0F{chunk} 1F{chunk} 1B{chunk}+0B{chunk}" for chunk in range(100))
    schedule = Schedule.parse(f"schedule s, chunks 100, stages on lanes 0 0\nlane 0: {lane}")
    few, many = (texts(svg(schedule, width=width)) for width in (2000, 900))
    for words in ("one block", "the later the stage, the paler"):
        assert words in few and words not in many


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_size_does_not_grow_with_chunks(name):
    some, more = (len(svg(by_name(name, 8, chunks))) for chunks in (500, 4000))
    assert more < 1.1 * some < 110_000
    assert max(len(svg(by_name(name, 4, chunks))) for chunks in (150, 170, 180, 190)) < 500_000


def test_64_lanes_and_512_chunks_are_less_than_half_a_megabyte():
    picture = svg(by_name("gpipe", 64, 512))
    assert len(picture) < 500_000
    assert len(texts(picture)) < 300


def test_a_wider_figure_shows_actions_one_by_one_again():
    schedule = by_name("gpipe", 2, 300)
    assert not cells(svg(schedule))
    assert len(cells(svg(schedule, width=4000))) == 1200


def test_more_than_8192_rectangles_are_never_drawn():
    assert len(cells(svg(by_name("gpipe", 64, 64), width=8000))) == 8192
    assert not cells(svg(by_name("gpipe", 64, 65), width=8000))


# ---- memory ----------------------------------------------------------------------------------------------------------

def curves(picture):
    return [outline(path.get("d")) for path in elements(picture, "path") if path.get("stroke") == "#4a5563"]


@LAWS
@given(schedules(), st.sampled_from([None, 1, 0]))
def test_curves_are_what_lanes_hold(schedule, kept):
    timeline = simulate(schedule, Costs(forward=1.5, activation=2, kept=kept))
    frame = Frame(timeline.lanes, timeline.makespan, 960)
    height, most = 0.8 * frame.row, max(timeline.peak_memory)
    for curve, steps in zip(curves(svg(timeline)), timeline.memory, strict=True):
        for half in range(int(2 * timeline.makespan)):
            time = half / 2 + 0.25
            held = next((level for at, level in reversed(steps) if at <= time), 0)
            drawn = next((level for x, level in reversed(curve) if x <= frame.x(time)), 0)
            assert drawn == pytest.approx(height * held / most, abs=0.02)


@pytest.mark.parametrize("lanes, chunks", [(2, 3), (4, 8), (4, 2000), (40, 6)])
def test_maxima_are_marked_and_named(lanes, chunks):
    timeline = simulate(by_name("1f1b", lanes, chunks), Costs(activation=2.5))
    picture = svg(timeline)
    bases = [float(path.get("d").split("H")[0].split(" ")[1]) for path in elements(picture, "path")
             if path.get("stroke") == "#4a5563"]
    highest = 0.8 * Frame(lanes, timeline.makespan, 960).row
    for mark, base, peak in zip(elements(picture, "circle"), bases, timeline.peak_memory, strict=True):
        assert base - float(mark.get("cy")) == pytest.approx(highest * peak / max(timeline.peak_memory), abs=0.06)
    assert len(bases) == lanes
    assert {f"{peak:g}" for peak in timeline.peak_memory} <= set(texts(picture))
    assert "held by each lane, and the maximum" in texts(picture)


def test_a_curve_has_no_notch_where_one_chunk_goes_and_the_next_comes_at_once():
    for curve in curves(svg(by_name("1f1b", 4, 8)))[1:]:
        levels = [level for _, level in curve]
        top = levels.index(max(levels))
        assert levels[:top] == sorted(levels[:top]) and levels[top:] == sorted(levels[top:], reverse=True)


def long_ago():
    """Many chunks come and go at once, then one stays for long."""
    events = [Event(Action(0, kind, chunk), 0, (4 * chunk + at) / 3, (4 * chunk + at + 1) / 3)
              for chunk in range(600) for at, kind in enumerate([Kind.F, Kind.B])]
    last = Event(Action(0, Kind.F, 600), 0, 1000, 1001), Event(Action(0, Kind.B, 600), 0, 1500, 1600)
    return Timeline((*events, *last), 1)


@pytest.mark.parametrize("timeline", [
    simulate(by_name("gpipe", 1, 5000)), simulate(by_name("1f1b", 3, 1000), Costs(link=1)), long_ago(),
])
def test_a_curve_of_many_steps_is_the_highest_of_each_pixel(timeline):
    frame = Frame(timeline.lanes, timeline.makespan, 960)
    most = max(timeline.peak_memory)
    for curve, steps in zip(curves(svg(timeline)), timeline.memory, strict=True):
        assert len(steps) > 960 > len(curve) - 10
        places = [frame.x(at) for at, _ in steps]
        for pixel in range(int(frame.left) + 1, int(frame.right)):
            first, after = bisect_right(places, pixel), bisect_left(places, pixel + 1)
            highest = max((level for _, level in steps[max(0, first - 1):after]), default=0)
            drawn = next((level for x, level in reversed(curve) if x <= pixel + 0.5), 0)
            assert drawn == pytest.approx(0.8 * frame.row * highest / most, abs=0.06)


def test_memory_can_be_left_out():
    schedule = by_name("1f1b", 4, 8)
    assert curves(svg(schedule)) and not curves(svg(schedule, memory=False))
    assert "chunks held by each lane, and the maximum" in texts(svg(schedule))
    heights = [float(fromstring(svg(schedule, memory=memory)).get("height")) for memory in (True, False)]
    assert heights[0] > heights[1] + 4 * 19


# ---- the page --------------------------------------------------------------------------------------------------------

@LAWS
@given(schedules(), st.integers(300, 1500), st.booleans())
def test_nothing_leaves_the_page_and_the_background_covers_it(schedule, width, memory):
    root = fromstring(svg(schedule, width=width, memory=memory))
    height = float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width} {height:g}" and root.get("width") == str(width)
    background = root.find(SVG + "rect")
    assert (background.get("width"), background.get("height"), background.get("fill")) == (
        str(width), f"{height:g}", "#ffffff"
    )
    for element in root.iter(SVG + "rect"):
        x, y, wide, high = [float(element.get(name, 0)) for name in ("x", "y", "width", "height")]
        assert 0 <= x and x + wide <= width and 0 <= y and y + high <= height
    for group in root.iter(SVG + "g"):
        for element in group.findall(SVG + "text"):
            size = float(element.get("font-size") or group.get("font-size") or 11)
            x, y, wide = float(element.get("x")), float(element.get("y")), 0.58 * size * len(element.text)
            left = x - {"middle": wide / 2, "end": wide}.get(element.get("text-anchor", group.get("text-anchor")), 0)
            assert 0 <= left and left + wide <= width and size <= y <= height - 3


def test_the_figure_of_many_lanes_is_no_higher_than_two_screens():
    assert float(fromstring(svg(by_name("gpipe", 64, 8))).get("height")) < 1500


def test_the_footer_tells_the_two_bubbles_apart():
    events = (Event(Action.parse("0F0"), 0, 0, 1), Event(Action.parse("1F0"), 1, 1, 2))
    assert "bubble 50.0% (flush), 0.0% (span)" in texts(svg(Timeline(events, 2)))[-1]


def test_the_footer_says_makespan_bubbles_and_peaks():
    picture = texts(svg(by_name("gpipe", 4, 8)))
    assert picture[-1] == "makespan 33 slots, bubble 27.3% (flush), 27.3% (span), peak in flight 8 8 8 8"
    assert "peak in flight 1 to 17" in texts(svg(by_name("1f1b", 17, 20)))[-1]
    assert texts(svg(by_name("gpipe", 17, 20)))[-1].endswith("peak in flight 20")


@pytest.mark.parametrize("title", ["a < b & c > \"d\"", "größer", "", "tab\tand\0nul\ud800"])
def test_titles_are_text(title):
    picture = svg(by_name("gpipe", 2, 2), title=title)
    shown = "".join(filter(str.isprintable, title))
    assert (shown in texts(picture)) == bool(shown)
    assert elements(picture, "title")[0].text == (shown or "timeline")


def test_a_schedule_is_named_and_a_timeline_is_not():
    schedule = by_name("gpipe", 2, 3)
    assert texts(svg(schedule))[0] == "gpipe: 2 lanes, 3 chunks"
    assert texts(svg(simulate(schedule)))[0] == "F forward"


@pytest.mark.parametrize("seconds, unit", [(12.0, "s"), (1.0, "s"), (0.9, "ms"), (0.002, "ms"), (0.0009, "us")])
def test_a_measured_timeline_has_an_axis_in_a_unit_that_fits(seconds, unit):
    timeline = Timeline.measured([Event(Action.parse("0F0"), 0, 3.0, 3.0 + seconds)], 2)
    found = texts(svg(timeline, memory=False))
    at = found.index(unit)
    labels = [float(text) for text in found[:at] if re.fullmatch(r"[\d.]+", text)][1:]  # the first is the chunk
    whole = seconds * {"s": 1, "ms": 1e3, "us": 1e6}[unit]
    assert labels[0] == 0 and 0.7 * whole < labels[-1] <= whole * (1 + 1e-9)
    frame = Frame(2, seconds, 960)
    (ticked,) = [group for group in elements(svg(timeline, memory=False), "g") if group.get("fill") == "#444444"]
    assert [float(text.get("x")) for text in ticked] == pytest.approx(
        [frame.left + frame.plot * label / whole for label in labels], abs=0.01
    )


@LAWS
@given(st.floats(1e-6, 1e9), st.floats(2, 20))
def test_ticks_are_about_as_many_as_asked_for_at_even_distances(last, about):
    found = ticks(last, about)
    assert found[0] == 0 and found[-1] <= last * (1 + 1e-9)
    assert about / 2.5 - 1 <= len(found) - 1 <= about * (1 + 1e-9)
    step = found[1] - found[0] if len(found) > 1 else 1
    assert found == pytest.approx([step * at for at in range(len(found))])
    assert f"{step:.0e}"[0] in "125"


@pytest.mark.parametrize("lanes", [1, 16, 26, 27, 45, 46, 64, 100, 200])
def test_names_of_lanes_do_not_touch(lanes):
    groups = [group for group in elements(svg(by_name("gpipe", lanes, 2)), "g") if group.get("text-anchor") == "end"]
    assert len(groups) == 2
    for group in groups:
        assert [text.text for text in group] == [f"lane {lane}" for lane in range(lanes)]
        places = [float(text.get("y")) for text in group]
        assert all(lower - upper >= float(group.get("font-size")) for upper, lower in zip(places, places[1:]))


def test_idle_is_shown():
    picture = svg(by_name("gpipe", 3, 2), memory=False)
    frame = Frame(3, 12, 960)
    rows = [element for element in elements(picture, "rect") if element.get("fill") == IDLE_COLOUR][1:]
    assert [box(row)[2:] for row in rows] == [pytest.approx([frame.plot, frame.row], abs=0.01)] * 3


@pytest.mark.parametrize("timeline", [
    Timeline((), 2), Timeline((), 1, "s"), simulate(by_name("gpipe", 2, 2), Costs(0, 0, 0)),
])
def test_nothing_and_no_time_are_drawn_too(timeline):
    assert texts(svg(timeline))[-1].startswith("makespan 0 ")
    assert len(cells(svg(timeline))) == len(timeline.events)


@pytest.mark.parametrize("orders", ["lane 0: 0F0 0F1\nlane 1: 1F0 1F1", "lane 0: 0F0 0F1\nlane 1:"])
def test_half_a_schedule_is_drawn(orders):
    schedule = Schedule.parse(f"schedule half, chunks 2, stages on lanes 0 1\n{orders}")
    assert set(cells(svg(schedule))) == {str(action) for order in schedule.orders for action in order}


def test_what_goes_back_without_having_come_holds_less_than_nothing_and_is_drawn_as_nothing():
    words = [("0B0", 0), ("0F0", 5), ("0F1", 7)]
    (curve,) = curves(svg(Timeline(tuple(Event(Action.parse(text), 0, at, at + 1) for text, at in words), 1)))
    assert min(level for _, level in curve) == 0 < max(level for _, level in curve)


@pytest.mark.parametrize("width", [299, 0, -5, 300.5, True, "960"])
def test_a_width_that_leaves_no_room_is_refused(width):
    with pytest.raises(ScheduleError, match="width is .*, but must be a whole number of at least 300"):
        svg(by_name("gpipe", 2, 2), width=width)


def test_a_schedule_that_cannot_end_is_refused_by_svg():
    with pytest.raises(ScheduleError, match="lane 0 waits at 0B0 for 0F0"):
        svg(Schedule.parse("schedule wrong, chunks 1, stages on lanes 0\nlane 0: 0B0 0F0"))
