"""Laws of what timelines and schedules show in a terminal and in a notebook."""

import sys
from xml.etree.ElementTree import fromstring

import pytest

from scheduler import Action, Costs, Event, Placement, Schedule, Timeline, by_name, draw, simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("lanes", "chunks"), [(1, 1), (2, 4), (3, 5), (4, 8), (7, 40), (16, 128), (41, 2), (90, 3)])
@pytest.mark.parametrize("measured", [False, True])
def test_a_timeline_prints_at_most_40_lines_of_120_columns_with_its_makespan(name, lanes, chunks, measured):
    timeline = simulate(by_name(name, lanes, chunks))
    if measured:
        timeline = Timeline.measured(timeline.events, lanes, turns=[range(lanes)])
    lines = str(timeline).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert ("take turns" in str(timeline)) == (measured and lanes > 1)
    assert f"makespan {timeline.makespan:.6g} {timeline.unit}" in str(timeline)


def test_a_timeline_that_fits_prints_as_it_is_drawn():
    timeline = simulate(by_name("1f1b", 3, 3))
    assert str(timeline) == draw(timeline)


def test_a_measured_timeline_of_as_many_lanes_as_lines_is_not_drawn():
    timeline = Timeline.measured(simulate(by_name("1f1b", 40, 1)).events, 40)
    assert "too long to draw here" in str(timeline)


def test_a_timeline_of_very_unequal_actions_is_not_drawn():
    """Its grid would have a million columns."""
    timeline = simulate(by_name("1f1b", 2, 2), Costs(backward=10**6 + 1 / 8))
    assert "2 lanes, 8 actions" in str(timeline)


def test_an_empty_timeline_prints():
    assert "makespan 0 slots" in str(Timeline((), 2))


@pytest.mark.parametrize("what", [by_name("1f1b", 2, 3), simulate(by_name("zb-h1", 4, 64))])
def test_a_picture_is_well_formed(what):
    assert fromstring(what._repr_svg_()).tag.endswith("svg")


def test_nothing_is_drawn_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    assert by_name("1f1b", 2, 3)._repr_svg_() is None


def test_nothing_is_drawn_of_a_schedule_that_cannot_end():
    order = (Action.parse("0B0"), Action.parse("0F0"))
    assert Schedule("wrong", Placement((0,)), 1, (order,))._repr_svg_() is None


def test_nothing_is_drawn_of_what_is_very_large():
    assert by_name("gpipe", 65, 1)._repr_svg_() is None
    events = [Event(Action.parse("0F0"), 0, time, time + 1) for time in range(20_001)]
    assert Timeline(tuple(events), 1)._repr_svg_() is None
