"""Laws of reports: times add up, and each change gains what `simulate` says of it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cover import examples
from hypothesis import given, settings
from scheduler_strategies import NAMED_RUNS

from pipeline.__main__ import main
from scheduler import (
    Action,
    Costs,
    Event,
    Kind,
    Report,
    ScheduleError,
    Timeline,
    by_name,
    chrome_trace,
    names,
    report,
    simulate,
)
from scheduler.advice import Job, advice
from scheduler.interruptions import interrupted

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(40))


@LAWS
@given(NAMED_RUNS)
def test_busy_waiting_and_idle_fill_the_step_of_every_lane_and_a_simulated_one_is_as_planned(run):
    schedule, costs = run
    timeline = simulate(schedule, costs)
    told = report(timeline)
    assert (told.step, told.unit, told.chunks, told.steps) == (float(timeline.makespan), costs.unit, schedule.chunks, 1)
    assert told.planned == told.step
    assert [row.stage for row in told.stages] == list(range(schedule.stages))
    for lane in range(schedule.lanes):
        rows = [row for row in told.stages if row.lane == lane]
        assert sum(row.busy + row.waiting for row in rows) + rows[0].idle == pytest.approx(told.step)
        assert sum(row.busy for row in rows) == pytest.approx(float(timeline.busy[lane]))
        assert len({row.idle for row in rows}) == 1
    assert all(row.busy == pytest.approx(row.planned_busy) for row in told.stages)
    assert not told.schedule or by_name(told.schedule, schedule.lanes, schedule.chunks).lanes == schedule.lanes
    assert [change.step for change in told.changes] == sorted(change.step for change in told.changes)
    assert all(change.gain >= 0.005 for change in told.changes)


@LAWS
@given(NAMED_RUNS)
def test_each_change_takes_the_time_that_simulate_says(run):
    schedule, costs = run
    costs = replace(costs, speed=1, unit="s")
    base = Costs.measured(simulate(schedule, costs))
    balance = [2 + stage for stage in range(schedule.stages)]
    told = report(simulate(schedule, costs), balance=balance)
    for change in told.changes:
        assert change.step == pytest.approx(float(by_hand(change.what, schedule, base, balance, told)))
        assert change.gain == pytest.approx(1 - change.step / told.planned)


def by_hand(what, schedule, costs, balance, told):
    """The step after a change that is told in words."""
    def scaled(factor):
        return {field: [factor(stage, list(getattr(costs, field))) for stage in range(schedule.stages)]
                for field in ("forward", "input", "weight", "backward") if getattr(costs, field) is not None}

    if match := re.fullmatch(r"move one of the (\d+) layers of stage (\d+) to stage (\d+)", what):
        layers, source, to = map(int, match.groups())
        assert layers == balance[source] and source == told.bottleneck and abs(source - to) == 1
        part = {source: -1, to: 1}
        moved = scaled(lambda stage, cost: cost[stage] + part.get(stage, 0) * cost[source] / layers)
        return simulate(schedule, replace(costs, **moved)).makespan
    if what.startswith("stages of equal work"):
        return simulate(schedule, replace(costs, **scaled(lambda stage, cost: sum(cost) / len(cost)))).makespan
    if match := re.fullmatch(r"(\d+) chunks, where half a chunk takes half the time", what):
        several = schedule.stages // schedule.lanes
        options = [{}, {"stages_per_lane": several}]
        for option in options:
            try:
                twice = by_name(told.schedule, schedule.lanes, int(match[1]), **option)
            except ScheduleError:
                continue
            if twice.stages == schedule.stages:
                return simulate(twice, replace(costs, **scaled(lambda stage, cost: cost[stage] / 2))).makespan
    if what == "links that take no time":
        return simulate(schedule, replace(costs, link=0)).makespan
    match = re.fullmatch(r"schedule='(.+?)'(?: \(holds (\d+) chunks on its fullest lane, now (\d+)\))?", what)
    other = simulate(by_name(match[1], schedule.lanes, schedule.chunks), costs)
    if match[2]:
        assert int(match[2]) == max(other.peak_in_flight) != int(match[3])
        assert int(match[3]) == max(simulate(schedule, costs).peak_in_flight)
    return other.makespan


def recomputed(schedule, costs, kept=()):
    """A clocked step in which all chunks but some are recomputed."""
    events = []
    for event in simulate(schedule, costs).events:
        if event.action.kind is Kind.B and event.action not in kept:
            half = event.start + event.duration / 2
            events += [event._replace(action=event.action._replace(kind=Kind.R), end=half), event._replace(start=half)]
        else:
            events.append(event)
    return Timeline.measured(events, schedule.lanes)


def test_what_keeping_all_activations_gains_is_the_time_of_the_recomputations():
    schedule = by_name("1f1b", 2, 4)
    timeline = recomputed(schedule, Costs(backward=4, unit="s"))
    told = report(timeline)
    assert told.planned == told.step == 25
    (keep,) = [change for change in told.changes if "checkpoint='never'" in change.what]
    assert keep.step == simulate(schedule, Costs(backward=2)).makespan == 15


@pytest.mark.parametrize("name, other", [("gpipe", "eager-1f1b"), ("1f1b", "zb-h1"), ("eager-1f1b", "gpipe")])
def test_what_other_orders_interrupt_is_recomputed_under_them(name, other):
    """checkpoint="except_last" recomputes fewer chunks under some schedules than under others."""
    schedule, costs = by_name(name, 3, 6), Costs([1] * 3, [1] * 3, [1] * 3, [2] * 3, [1] * 3)

    def step(ran, pairs, costs=costs):
        return simulate(ran, replace(costs, recompute=lambda *pair: costs.recompute[0] * (pair in pairs))).makespan

    job = Job(schedule, costs, interrupted(schedule.orders))
    changed, doubled = by_name(other, 3, 6), by_name(name, 3, 12)
    assert job.under(changed).step == step(changed, interrupted(changed.orders))
    assert job.under(doubled).step == step(doubled, interrupted(doubled.orders))
    some = replace(job, recomputed=frozenset({(0, 1), (2, 5)}))  # a policy of the user's
    assert some.under(changed).step == step(changed, {(0, 1), (2, 5)})
    assert some.under(doubled).step == step(doubled, {(0, 2), (0, 3), (2, 10), (2, 11)})
    told = {change.what: change.step for change in advice(job, None, 0)}
    better = [what for what in told if what.startswith(f"schedule='{other}'")]
    assert [told[what] for what in better] == [step(changed, interrupted(changed.orders))] * len(better)
    assert bool(better) == (job.under(changed).step < 0.995 * job.step)


def test_only_the_chunks_that_were_recomputed_are_planned_so():
    kept = {Action(0, Kind.B, 0), Action(1, Kind.B, 2)}
    events = [event for event in recomputed(by_name("1f1b", 2, 4), Costs(backward=4), kept).events]
    whole = [event._replace(end=event.end) for event in events]
    timeline = Timeline.measured(whole, 2)
    told = report(timeline)
    assert len(timeline.recomputed) == 6
    assert told.stages[0].planned_busy == told.stages[0].busy


KINDS = {"number": 0.5, "stages": (0.5, 0.5), "function": lambda stage, chunk: chunk % 2}


@pytest.mark.parametrize("recompute", KINDS.values(), ids=KINDS)
def test_planned_costs_count_as_simulate_takes_them(recompute):
    """A plan that recomputes half of a stage's chunks costs half a forward a chunk, of all chunks."""
    schedule = by_name("1f1b", 2, 4)
    timeline = recomputed(schedule, Costs(backward=4), kept={Action(stage, Kind.B, 0) for stage in (0, 1)})
    planned = Costs(recompute=recompute, unit="s")
    told = report(timeline, planned)
    assert told.planned == simulate(schedule, planned).makespan
    assert tuple(row.planned_busy for row in told.stages) == simulate(schedule, planned).busy


def test_one_thread_takes_the_sum_of_its_lanes_and_no_bubble_can_be_saved():
    schedule = by_name("1f1b", 2, 2)
    at, events = 0.0, []
    for event in simulate(schedule, Costs(unit="s")).events:
        events.append(event._replace(start=at, end=at + event.duration))
        at += event.duration
    told = report(Timeline.measured(events, 2, turns=[[0, 1]]), balance=[2, 2])
    assert told.step == told.planned == 12 and told.changes == ()
    assert "no change that was tried saves half a percent" in str(told) and "lanes 0 1 take turns" in str(told)


def test_medians_are_taken_over_steps_and_planned_costs_stand_beside():
    schedule = by_name("gpipe", 2, 2)
    steps = [simulate(schedule, Costs(forward=forward, unit="s")) for forward in (1, 2, 9)]
    told = report(steps, Costs(forward=1, unit="s", activation=100, kept=10))
    assert (told.steps, told.step, told.planned) == (3, simulate(schedule, Costs(forward=2)).makespan, 9)
    assert (told.stages[0].busy, told.stages[0].planned_busy) == (2 * 2 + 4, 2 + 4)
    assert [(row.held, row.planned_held) for row in told.stages] == [(200, 200)] * 2
    assert "held: activations, counted over the order that ran" in str(told)

    class Plan:
        costs = Costs(forward=1, unit="s", activation=100, kept=10)

    assert report(steps, Plan()) == told


def test_planned_costs_of_another_unit_are_refused():
    slots = simulate(by_name("1f1b", 2, 2))
    for timeline, costs in ((slots, Costs(unit="s")), (replace(slots, unit="s"), Costs())):
        words = rf"in {costs.unit}, but the timelines in {timeline.unit}. .*Costs\(unit=\"{timeline.unit}\"\)"
        with pytest.raises(ScheduleError, match=words):
            report(timeline, costs)


def test_bytes_of_the_devices_stand_beside_their_lanes():
    told = report(simulate(by_name("1f1b", 2, 2)), peak_bytes=[2**20, None])
    assert [row.peak_bytes for row in told.stages] == [2**20, None]
    assert "1,048,576" in str(told) and "peak bytes: allocated" in str(told)
    with pytest.raises(ScheduleError, match="watts are given, but the timelines count slots. Trace steps, in seconds."):
        report(simulate(by_name("1f1b", 2, 2)), watts=[100, 200])
    with pytest.raises(ScheduleError, match="utilisation lists 3 numbers but there are 2 lanes"):
        report(simulate(by_name("1f1b", 2, 2)), utilisation=[0, 0, 0])
    with pytest.raises(ScheduleError, match="peak_bytes lists 1 numbers but there are 2 lanes .*List 2."):
        report(simulate(by_name("1f1b", 2, 2)), peak_bytes=[1])


@LAWS
@given(NAMED_RUNS)
def test_json_has_the_numbers_of_the_report(run):
    told = report(simulate(*run))
    read = json.loads(told.to_json())
    assert read == json.loads(json.dumps(told.as_dict(), default=float))
    assert (read["step"], len(read["stages"]), read["bottleneck"]) == (told.step, len(told.stages), told.bottleneck)
    assert set(read) == {field for field in Report.__dataclass_fields__}


def test_a_suggested_schedule_is_one_that_a_pipe_takes_by_name():
    for lanes in (2, 3, 4):
        for change in report(simulate(by_name("gpipe", lanes, 6), Costs(forward=2))).changes:
            if match := re.match("schedule='(.+?)'", change.what):
                assert match[1] in names() and by_name(match[1], lanes, 6).stages == lanes


@pytest.mark.parametrize("balance", [3, "21", {0: 2, 1: 1}])
def test_a_balance_that_is_no_list_is_refused(balance):
    with pytest.raises(ScheduleError, match="balance is .*. List the layers of each stage"):
        report(simulate(by_name("1f1b", lanes=2, chunks=2)), balance=balance)


def test_what_is_no_step_is_refused():
    one = simulate(by_name("1f1b", 2, 2))
    events = [*one.events, *(Event(action, lane, start + 20, end + 20) for action, lane, start, end in one.events)]
    with pytest.raises(ScheduleError, match="0F0 ran several times: this timeline is of several steps. Give one"):
        report(Timeline(tuple(events), 2))
    with pytest.raises(ScheduleError, match="different orders. Report on steps of one schedule"):
        report([one, simulate(by_name("gpipe", 2, 2))])
    with pytest.raises(ScheduleError, match=r"balance lists 1 stages but 2 ran \(balance: \[4\]\). List the layers"):
        report(one, balance=[4])
    with pytest.raises(ScheduleError, match=r"balance\[1\] is 0, but must be a whole number of at least 1"):
        report(one, balance=[4, 0])
    with pytest.raises(ScheduleError, match="forward lists 3 costs but there are 2 stages"):
        report(one, Costs(forward=(1, 2, 3)))


def test_joules_of_a_step_are_power_times_its_seconds():
    timeline = simulate(by_name("interleaved", 2, 2), Costs(forward=0.5, backward=1, unit="s"))
    told = report(timeline, watts=[None, 300], utilisation=[0.25, None])
    assert [row.joules for row in told.stages] == [None, 300 * told.step] * 2
    assert [row.utilisation for row in told.stages] == [0.25, None] * 2
    shown = str(told)
    assert re.search(rf"joules  utilisation\n .*    -          25%\n .* {300 * told.step:.4g} J            -\n", shown)
    assert "note: joules: of a lane's device as a whole, its mean power while it was sampled times a step" in shown
    assert json.loads(told.to_json())["stages"][1]["joules"] == 300 * told.step
    assert report(timeline, watts=[None, None]).stages == report(timeline).stages


def test_the_command_prints_the_report_of_saved_traces(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    timelines = [simulate(by_name("1f1b", 2, 4), Costs(forward=(1, size), unit="s")) for size in (2, 3, 9)]
    for number, timeline in enumerate(timelines):
        Path(f"{number}.json").write_text(chrome_trace(timeline))
    assert main("report 0.json 1.json 2.json --balance 3,4".split()) == 0
    assert capsys.readouterr().out == f"{report(timelines, balance=[3, 4])}\n"
    assert main("report 1.json --json".split()) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(report(timelines[1]).to_json())


@pytest.mark.parametrize("words, said", [
    ("report none.json", "'none.json': No such file or directory. See penstock report --help."),
    ("report wrong.json", "cannot read wrong.json: this is not the trace of a timeline"),
    ("report bytes.json", "cannot read bytes.json: this is not the trace of a timeline"),
    ("report right.json --balance 3", "balance lists 1 stages but 2 ran"),
    ("report right.json --balance 3,1.5", "balance\\[1\\] is 1.5, but must be a whole number"),
    ("report", "Missing argument 'FILE...'"),
])
def test_the_command_refuses_in_words(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text("{}")
    Path("bytes.json").write_bytes(b"\xff")
    Path("right.json").write_text(chrome_trace(simulate(by_name("1f1b", 2, 4))))
    assert main(words.split()) == 2
    assert re.search(said, capsys.readouterr().err)
