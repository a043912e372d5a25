"""Law 6: the actions that ran, as the layers saw them, are the order of the schedule that was verified."""

from collections import defaultdict

import pytest
import torch
from pipeline_probes import Seen, labelled, pairs, probes, run, sum_of
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.execution.plan import plan_forward, plan_step
from scheduler import Kind, Schedule, by_name, draw, requires, simulate

ENTRIES = ("forward", "step")
SCHEDULES = ("gpipe", "1f1b")


def ran(log: list[Seen]) -> list[str]:
    """What the layers saw, without recomputations, in the words of a schedule."""
    return [f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log if seen.kind != "R"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@pytest.mark.parametrize("policy", ["always", "never"])
def test_each_lane_of_a_step_runs_its_order_of_the_schedule(
    schedule: str, stages: int, chunks: int, policy: str
) -> None:
    model, log = probes(stages)
    run(Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint=policy), labelled(chunks), "step")
    lanes = defaultdict(list)
    for action in ran(log):
        lanes[int(action[0])].append(action)
    orders = by_name(schedule, stages, chunks).orders
    assert [lanes[lane] for lane in range(stages)] == [[str(action) for action in order] for order in orders]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_the_forward_entry_point_runs_all_forwards_then_all_backwards_ascending_whatever_the_schedule(
    schedule: str, chunks: int
) -> None:
    model, log = probes(3)
    pipe = Pipe(model, [1, 1, 1], chunks, schedule=schedule)
    out = pipe(labelled(chunks))
    assert {seen.kind for seen in log} == {"F"} and len(log) == 3 * chunks
    log.clear()
    out.sum().backward()
    assert {seen.kind for seen in log} <= {"B", "R"} and len(pairs(log, "B")) == 3 * chunks
    for stage in range(3):
        assert [chunk for at, chunk in pairs(log, "B") if at == stage] == list(range(chunks))


@pytest.mark.inline
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages, chunks", [(1, 4), (2, 3), (4, 6), (5, 2)])
@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
def test_what_ran_is_the_merged_order_that_policies_and_bounds_read(
    entry: str, schedule: str, stages: int, chunks: int, policy: str
) -> None:
    model, log = probes(stages)
    pipe = Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint=policy)
    with pipe.trace() as trace:
        run(pipe, labelled(chunks), entry)
    planner = plan_step if entry == "step" else plan_forward
    (merged,) = planner(by_name(schedule, stages, chunks), ["cpu"] * stages).device_orders
    assert ran(log) == [str(action) for action in merged]
    assert [str(event.action) for event in trace.timeline.events] == [f"{s.stage}{s.kind}{s.chunk}" for s in log]
    assert trace.timeline.recomputed == set(pairs(log, "R"))


def test_a_trace_that_has_ended_does_not_record_the_backward() -> None:
    pipe = Pipe(probes(2)[0], [1, 1], 3)
    with pipe.trace() as trace:
        loss = pipe(labelled(3)).sum()
    loss.backward()
    assert sorted(str(event.action) for event in trace.timeline.events) == ["0F0", "0F1", "0F2", "1F0", "1F1", "1F2"]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_runs_before_what_it_requires(entry: str, schedule: str) -> None:
    model, log = probes(4)
    pipe = Pipe(model, [1] * 4, 5, schedule=schedule)
    run(pipe, labelled(5), entry)
    actions = {str(action): action for action in by_name(schedule, 4, 5).actions}
    done: set[object] = set()
    for name in ran(log):
        assert done.issuperset(requires(actions[name], 4))
        done.add(actions[name])
    assert len(done) == 40


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("policy", ["always", "except_last", lambda stage, chunk: chunk % 2 == 0])
def test_a_recomputation_runs_just_before_its_own_backward_and_once(entry: str, policy: object) -> None:
    model, log = probes(3)
    run(Pipe(model, [1, 1, 1], 4, checkpoint=policy), labelled(4), entry)
    for at, seen in enumerate(log):
        if seen.kind == "R":
            assert log[at + 1] == Seen("B", seen.stage, seen.chunk)
    assert len(set(log)) == len(log)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_a_step_holds_as_many_chunks_in_flight_as_the_simulation_says(schedule: str, chunks: int) -> None:
    model, log = probes(3)
    run(Pipe(model, [1, 1, 1], chunks, schedule=schedule, checkpoint="never"), labelled(chunks), "step")
    peaks = [0, 0, 0]
    held = [0, 0, 0]
    for seen in log:
        held[seen.stage] += {"F": 1, "B": -1}[seen.kind]
        peaks[seen.stage] = max(peaks[seen.stage], held[seen.stage])
    assert tuple(peaks) == simulate(by_name(schedule, 3, chunks)).peak_in_flight
    assert held == [0, 0, 0]


def test_a_schedule_given_as_data_is_what_runs() -> None:
    """Neither GPipe nor 1F1B: lane 0 runs two chunks ahead, then drains."""
    text = """
        schedule mine, chunks 3, stages on lanes 0 1
        lane 0: 0F0 0F1 0B0 0F2 0B1 0B2
        lane 1: 1F0 1F1 1B0 1B1 1F2 1B2
    """
    schedule = Schedule.parse(text)
    model, log = probes(2)
    run(Pipe(model, [1, 1], 3, schedule=schedule), labelled(3), "step")
    for lane, order in enumerate(schedule.orders):
        assert [action for action in ran(log) if action[0] == str(lane)] == [str(action) for action in order]


def test_stages_that_share_a_lane_run_in_the_order_of_that_lane() -> None:
    text = """
        schedule loop, chunks 2, stages on lanes 0 1 0
        lane 0: 0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1
        lane 1: 1F0 1F1 1B0 1B1
    """
    schedule = Schedule.parse(text)
    model, log = probes(3)
    pipe = Pipe(model, [1, 1, 1], 2, schedule=schedule)
    with pipe.trace() as trace:
        run(pipe, labelled(2), "step")
    assert [action for action in ran(log) if action[0] in "02"] == [str(action) for action in schedule.orders[0]]
    assert {(event.action.stage, event.lane) for event in trace.timeline.events} == {(0, 0), (1, 1), (2, 0)}


@pytest.mark.parametrize("how", ["step", "forward", "evaluate"])
@pytest.mark.parametrize(
    ("letters", "workers", "turns"),
    [
        ("aaa", "inline", ((0, 1, 2),)), ("abc", "inline", ((0, 1, 2),)), ("aaa", "threads", ((0, 1, 2),)),
        ("abc", "threads", ()), ("aba", "threads", ((0, 2),)),
    ],
)  # fmt: skip
def test_a_timeline_says_which_lanes_take_turns(
    letters: str, workers: str, turns: tuple[tuple[int, ...], ...], how: str
) -> None:
    places = [Place(torch.device("cpu"), letter) for letter in letters]
    pipe = Pipe(probes(3)[0], [1, 1, 1], 4, devices=places, workers=workers)
    x = labelled(4)
    with pipe.trace() as trace:
        if how == "step":
            timeline = pipe.step(x, loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
        elif how == "evaluate":
            timeline = pipe.evaluate(x, loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
        else:
            pipe(x).sum().backward()
            timeline = None
    assert timeline is None or timeline.turns == turns
    assert trace.timeline.turns == turns
    assert ("take turns" in draw(trace.timeline)) is bool(turns)


@pytest.mark.inline
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_rows_than_chunks_run_the_schedule_of_the_rows(schedule: str) -> None:
    model, log = probes(2)
    run(Pipe(model, [1, 1], 8, schedule=schedule), labelled(3, rows=1), "step")
    merged = plan_step(by_name(schedule, 2, 3), ["cpu"] * 2).device_orders[0]
    assert ran(log) == [str(action) for action in merged]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evaluation_runs_the_forwards_alone(schedule: str) -> None:
    model, log = probes(3)
    pipe = Pipe(model, [1, 1, 1], 4, schedule=schedule)
    step = pipe.evaluate(labelled(4), loss_fn=lambda out, target: out.sum(), loss_reduction="sum", trace=True)
    assert sorted(ran(log)) == sorted(str(a) for a in by_name(schedule, 3, 4).actions if a.kind is Kind.F)
    assert [str(event.action) for event in step.timeline.events] == ran(log)


@pytest.mark.parametrize("entry", ENTRIES)
def test_backward_through_frozen_lanes_is_empty_but_traced(entry: str) -> None:
    model, log = probes(3)
    model[0].requires_grad_(False)
    pipe = Pipe(model, [1, 1, 1], 3)
    with pipe.trace() as trace:
        run(pipe, labelled(3), entry)
    assert len([event for event in trace.timeline.events if event.action.kind is not Kind.R]) == 18
    assert {stage for stage, _ in pairs(log, "B")} == {1, 2}


def test_two_calls_under_way_at_a_time_do_not_mix() -> None:
    model, log = probes(2)
    pipe = Pipe(model, [1, 1], 2, checkpoint="always")
    first, second = pipe(labelled(2)), pipe(labelled(2) * torch.tensor([1.0, 2, 2, 2], dtype=torch.float64))
    log.clear()
    (one,) = torch.autograd.grad(second.sum(), [model[0].weight])
    (two,) = torch.autograd.grad(first.sum(), [model[0].weight])
    assert len(pairs(log, "B")) == 8 and not torch.equal(one, two)
    (again,) = torch.autograd.grad(pipe(labelled(2)).sum(), [model[0].weight])
    assert torch.equal(two, again)


def test_a_call_within_a_layer_of_another_pipe_keeps_its_own_order() -> None:
    class Detour(nn.Module):
        """Runs a whole step of another pipe within a forward."""

        def __init__(self) -> None:
            super().__init__()
            inner, self.inner_log = probes(2)
            self.inner = [Pipe(inner, [1, 1], 2)]  # in a list: no parameters of this layer

        def forward(self, x: Tensor) -> Tensor:
            run(self.inner[0], labelled(2), "step")
            return x * 1

    model, log = probes(1)
    detour = Detour()
    run(Pipe(nn.Sequential(model[0], detour), [1, 1], 2, checkpoint="never"), labelled(2), "step")
    assert ran(log) == ["0F0", "0F1", "0B0", "0B1"] or len(ran(log)) == 4
    assert len(pairs(detour.inner_log, "B")) == 8
