"""Law 3: what is recomputed, and whether modules are told the truth about it."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_probes import Probe, Seen, interrupted, labelled, pairs, probes, run, sum_of
from torch import Tensor, nn

import pipeline
from pipeline import CheckpointError, Pipe, is_checkpointing, is_recomputing, layer_seed
from pipeline.common.places import Place
from pipeline.data.pytrees import same_values
from pipeline.execution.engine import merged_order
from pipeline.execution.plan import CallPlan, plan_forward, plan_step
from pipeline.recompute.policy import recomputed
from pipeline.recompute.randomness import draw_seed
from scheduler import Action, Kind, Schedule, by_name

ENTRIES = ("forward", "step")
SCHEDULES = ("gpipe", "1f1b")


def odd(stage: int, chunk: int) -> bool:
    return (stage + chunk) % 2 == 1


# ------------------------------------------------------------------------------------------ gradients decide, no mode


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_chunk_is_recomputed_once_under_always_and_none_under_never_in_train_and_eval_mode(
    training: bool, entry: str, schedule: str
) -> None:
    model, log = probes(3)
    pipe = Pipe(model, [1, 1, 1], chunks=4, schedule=schedule, checkpoint="always").train(training)
    everything = sorted(product(range(3), range(4)))
    run(pipe, labelled(4), entry)
    assert sorted(pairs(log, "F")) == sorted(pairs(log, "R")) == sorted(pairs(log, "B")) == everything
    log.clear()
    pipe.checkpoint = "never"
    run(pipe, labelled(4), entry)
    assert sorted(pairs(log, "F")) == sorted(pairs(log, "B")) == everything and not pairs(log, "R")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["always", "except_last", odd])
def test_without_gradients_nothing_is_recomputed_nor_said_to_be(training: bool, mode: type, policy: object) -> None:
    model, log = probes(2)
    pipe = Pipe(model, [1, 1], chunks=3, checkpoint=policy).train(training)
    with mode():
        out = pipe(labelled(3).requires_grad_())
    assert not out.requires_grad and {seen.kind for seen in log} == {"F"} and len(log) == 6
    assert all(probe.told == [(False, False)] * 3 for probe in model)


def test_an_evaluation_recomputes_nothing_even_with_gradients_on() -> None:
    model, log = probes(2)
    pipe = Pipe(model, [1, 1], chunks=3, checkpoint="always")
    pipe.evaluate(labelled(3), loss_fn=sum_of, loss_reduction="sum")
    assert {seen.kind for seen in log} == {"F"} and len(log) == 6


def test_the_policy_is_not_asked_without_gradients() -> None:
    def never_asked(stage: int, chunk: int) -> bool:
        raise AssertionError

    model, _ = probes(2)
    with torch.no_grad():
        Pipe(model, [1, 1], chunks=3, checkpoint=never_asked)(labelled(3))


def test_the_policy_in_force_is_the_one_of_the_forward() -> None:
    model, log = probes(2)
    pipe = Pipe(model, [1, 1], chunks=2, checkpoint="always")
    out = pipe(labelled(2))
    pipe.checkpoint = "never"
    out.sum().backward()
    assert len(pairs(log, "R")) == 4


@pytest.mark.parametrize("entry", ENTRIES)
def test_frozen_stages_in_front_are_not_recomputed(entry: str) -> None:
    model, log = probes(3)
    model[0].requires_grad_(False)
    run(Pipe(model, [1, 1, 1], chunks=3, checkpoint="always"), labelled(3), entry)
    assert {stage for stage, _ in pairs(log, "R")} == {1, 2}
    assert {stage for stage, _ in pairs(log, "B")} == {1, 2}


# --------------------------------------------------------------------------------------------------- except_last


@pytest.mark.inline
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_except_last_recomputes_where_another_backward_of_the_device_stands_between(
    entry: str, schedule: str, stages: int, chunks: int
) -> None:
    model, log = probes(stages)
    run(Pipe(model, [1] * stages, chunks=chunks, schedule=schedule, checkpoint="except_last"), labelled(chunks), entry)
    assert set(pairs(log, "R")) == interrupted(log)
    assert len(pairs(log, "R")) == len(set(pairs(log, "R")))


@pytest.mark.inline
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_forward_entry_point_on_one_device_keeps_the_one_chunk_that_goes_back_first(schedule: str) -> None:
    model, log = probes(3)
    run(Pipe(model, [1, 1, 1], chunks=4, schedule=schedule), labelled(4), "forward")
    assert set(product(range(3), range(4))) - set(pairs(log, "R")) == {(2, 0)}


def test_1f1b_on_one_device_keeps_the_last_stage_since_each_of_its_chunks_goes_back_at_once() -> None:
    model, log = probes(3)
    run(Pipe(model, [1, 1, 1], chunks=4, schedule="1f1b"), labelled(4), "step")
    assert {(2, chunk) for chunk in range(4)} <= set(product(range(3), range(4))) - set(pairs(log, "R"))


def brute_force(plan: CallPlan, devices: list[str]) -> set[tuple[int, int]]:
    """The rule in words, action by action, on the order in which the plan runs."""
    ran: list[Action] = []
    lane_of = plan.schedule.placement.lane_of
    for phase in plan.phases:
        lanes = [[action for action in phase.merged if lane_of[action.stage] == lane] for lane in set(lane_of)]
        assert phase.merged == merged_order(lanes, phase.needs)
        ran += phase.merged
    found = set()
    for at, action in enumerate(ran):
        if action.kind is not Kind.F:
            continue
        for other in ran[at + 1 :]:
            if (other.stage, other.chunk) == (action.stage, action.chunk) and other.kind in (Kind.B, Kind.I):
                break
            if other.kind in (Kind.B, Kind.I) and devices[other.stage] == devices[action.stage]:
                found.add((action.stage, action.chunk))
    return found


@given(
    name=st.sampled_from(SCHEDULES),
    planner=st.sampled_from([plan_forward, plan_step]),
    devices=st.lists(st.sampled_from("abcd"), min_size=1, max_size=6),
    chunks=st.integers(1, 7),
)
def test_except_last_is_the_rule_for_any_placement_of_stages_on_devices(
    name: str, planner: object, devices: list[str], chunks: int
) -> None:
    plan = planner(by_name(name, len(devices), chunks), devices)
    assert plan.recomputed("except_last") == brute_force(plan, devices)
    assert sorted(action for order in plan.device_orders for action in order) == sorted(plan.schedule.actions)


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
def test_with_a_device_for_each_stage_only_the_order_of_its_own_lane_counts(lanes: int, chunks: int) -> None:
    devices = list(range(lanes))
    everything = set(product(range(lanes), range(chunks)))
    first = {(stage, 0) for stage in range(lanes)}
    gpipe, one = by_name("gpipe", lanes, chunks), by_name("1f1b", lanes, chunks)
    # GPipe, and the forward entry point of any schedule: exactly the one chunk per device that goes back first is kept.
    for plan in (plan_step(gpipe, devices), plan_forward(gpipe, devices), plan_forward(one, devices)):
        assert everything - plan.recomputed("except_last") == first
    kept = everything - plan_step(one, devices).recomputed("except_last")
    assert {(lanes - 1, chunk) for chunk in range(chunks)} <= kept  # 1F1B's last stage recomputes nothing
    assert first <= kept
    for stage, order in enumerate(one.orders):
        alone = [Seen(str(action.kind), action.stage, action.chunk) for action in order]
        assert {pair for pair in everything - kept if pair[0] == stage} == interrupted(alone)


def test_w_does_not_count_as_a_backward_and_i_does() -> None:
    def order(text: str) -> tuple[Action, ...]:
        return tuple(Action.parse(word) for word in text.split())

    assert recomputed("except_last", [order("0F0 0I0 0F1 0W0 0I1 0W1")]) == frozenset()
    assert recomputed("except_last", [order("0F0 0F1 0I0 0W0 0I1 0W1")]) == {(0, 1)}
    schedule = Schedule.parse("schedule split, chunks 2, stages on lanes 0\nlane 0: 0F0 0I0 0F1 0W0 0I1 0W1")
    assert plan_step(schedule, ["cpu"]).recomputed("except_last") == frozenset()
    assert plan_forward(schedule, ["cpu"]).recomputed("except_last") == {(0, 1)}


@given(
    name=st.sampled_from(SCHEDULES), lanes=st.integers(1, 5), chunks=st.integers(1, 6),
    seed=st.integers(0, 2**10), step=st.booleans(),
)
def test_what_is_kept_under_except_last_never_overlaps_another_backward_on_its_device(
    name: str, lanes: int, chunks: int, seed: int, step: bool
) -> None:
    """So its peak equals that of always: at most one (stage, chunk) of a device holds its activations at any time."""
    devices = [(seed >> (2 * stage)) % 3 for stage in range(lanes)]
    plan = (plan_step if step else plan_forward)(by_name(name, lanes, chunks), devices)
    again = plan.recomputed("except_last")
    for order in plan.device_orders:
        held = 0
        for action in order:
            kept = (action.stage, action.chunk) not in again
            if action.kind is Kind.F:
                held += kept
            else:
                assert held == kept  # the only activations there are, or none but those to be made again
                held -= kept
            assert held <= 1


# ---------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_callable_is_asked_for_each_stage_and_chunk_and_obeyed(entry: str) -> None:
    model, log = probes(3)
    asked: list[tuple[int, int]] = []

    def policy(stage: int, chunk: int) -> bool:
        asked.append((stage, chunk))
        return odd(stage, chunk)

    run(Pipe(model, [1, 1, 1], chunks=3, checkpoint=policy), labelled(3), entry)
    assert sorted(asked) == sorted(product(range(3), range(3)))
    assert set(pairs(log, "R")) == {pair for pair in asked if odd(*pair)}


@pytest.mark.parametrize("answer", [1, 0, None, "yes", torch.tensor(True)])
def test_an_answer_that_is_no_bool_is_refused_before_anything_runs(answer: object) -> None:
    model, log = probes(2)
    pipe = Pipe(model, [1, 1], chunks=2, checkpoint=lambda stage, chunk: answer)
    with pytest.raises(ValueError, match=r"checkpoint returned .* for stage 0, chunk 0\. Return True or False\."):
        pipe(labelled(2))
    assert not log


@pytest.mark.parametrize("policy", ["sometimes", "", None, True, 3, ["always"]])
def test_an_unknown_policy_is_refused_with_what_there_is(policy: object) -> None:
    words = r"checkpoint is .*Use 'always', 'except_last', 'never', or a callable \(stage, chunk\) -> bool\."
    with pytest.raises(ValueError, match=words):
        Pipe(nn.Sequential(nn.Tanh()), [1], checkpoint=policy)
    pipe = Pipe(nn.Sequential(nn.Tanh()), [1])
    with pytest.raises(ValueError, match=words):
        pipe.checkpoint = policy
    assert pipe.checkpoint == "except_last"


# ---------------------------------------------------------------------------------------- the truth inside modules

DROPPED, AGAIN, PLAIN = (True, False), (False, True), (False, False)  # (is_checkpointing, is_recomputing)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("training", [True, False])
def test_modules_are_told_whether_a_forward_is_dropped_or_repeats_one(entry: str, training: bool) -> None:
    for policy, told in (("always", [DROPPED, AGAIN]), ("never", [PLAIN])):
        model, _ = probes(2)
        run(Pipe(model, [1, 1], chunks=1, checkpoint=policy).train(training), labelled(1), entry)
        assert [probe.told for probe in model] == [told, told]
        assert not is_checkpointing() and not is_recomputing()


@pytest.mark.parametrize("entry", ENTRIES)
def test_modules_are_told_chunk_by_chunk(entry: str) -> None:
    model, log = probes(2)
    run(Pipe(model, [1, 1], chunks=3, checkpoint=odd), labelled(3), entry)
    for stage, probe in enumerate(model):
        forwards = [seen for seen in log if seen.stage == stage and seen.kind != "B"]
        for seen, told in zip(forwards, probe.told, strict=True):
            expected = AGAIN if seen.kind == "R" else DROPPED if odd(stage, seen.chunk) else PLAIN
            assert told == expected


def test_a_second_order_recomputation_says_that_it_recomputes_for_kept_chunks_too() -> None:
    for policy, first in (("always", DROPPED), ("never", PLAIN)):
        model, _ = probes(2)
        x = labelled(2).requires_grad_()
        torch.autograd.grad(Pipe(model, [1, 1], chunks=2, checkpoint=policy)(x).sum(), x, create_graph=True)
        assert [probe.told for probe in model] == [[first, first, AGAIN, AGAIN]] * 2
        assert not is_checkpointing() and not is_recomputing()


NESTED = {
    ("never", "never"): [PLAIN],
    ("always", "never"): [DROPPED, AGAIN],
    ("never", "always"): [DROPPED, AGAIN],
    # The outer recomputation is a forward of the inner pipe: it repeats one, and is dropped again by the inner policy.
    ("always", "always"): [DROPPED, (True, True), AGAIN],
}


@pytest.mark.parametrize("policies", NESTED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_pipe_inside_a_pipe_is_told_the_truth_of_both(policies: tuple[str, str], entry: str) -> None:
    outer, inner = policies
    model, _ = probes(2)
    probe: Probe = model[1]
    pipe = Pipe(nn.Sequential(model[0], Pipe(nn.Sequential(probe), [1], checkpoint=inner)), [1, 1], checkpoint=outer)
    run(pipe, labelled(1), entry)
    assert probe.told == NESTED[policies]
    assert not is_checkpointing() and not is_recomputing()


class Fails(nn.Module):
    """Raises in the forward or in the recomputation."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing() is (self.when == "R"):
            raise KeyError(self.when, (is_checkpointing(), is_recomputing()))
        return x * 1


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("when", ["F", "R"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_both_are_false_again_after_an_exception(entry: str, when: str, create_graph: bool) -> None:
    model, _ = probes(1)
    pipe = Pipe(nn.Sequential(model[0], Fails(when)), [1, 1], chunks=2, checkpoint="always")
    with pytest.raises(KeyError) as caught:
        if create_graph:
            pipe(labelled(2)).sum().backward(create_graph=True)
        else:
            run(pipe, labelled(2), entry)
    assert caught.value.args[1] == (DROPPED if when == "F" else AGAIN)
    assert not is_checkpointing() and not is_recomputing() and torch.is_grad_enabled()


@pytest.mark.parametrize("entry", ENTRIES)
def test_grad_mode_within_the_layers_is_the_callers_in_f_and_on_in_r(entry: str) -> None:
    """F of a recomputed chunk under no_grad would take other kernels, and not know which outputs require grad."""
    seen: list[tuple[bool, bool]] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_grad_enabled(), (x * 1).requires_grad))
            return x

    model, _ = probes(1)
    run(Pipe(nn.Sequential(model[0], Looks()), [1, 1], chunks=2, checkpoint="always"), labelled(2), entry)
    assert seen == [(True, True)] * 4


class Inner(nn.Module):
    """Differentiates within its own forward; first it writes buffers and may draw from generators of several kinds."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(2)
        self.draws = draws
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.replaced = self.replaced * 2
        scale = torch.rand((), generator=self.generator, dtype=x.dtype) + random.random() if self.draws else 1.0
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return grad * scale * self.replaced


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("policy", ["always", "except_last", "never", odd, lambda stage, chunk: chunk == 2])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("devices", [None, [Place(torch.device("cpu"), "0"), Place(torch.device("cpu"), "1")]])
def test_a_layer_that_differentiates_within_its_own_forward_is_right(
    entry: str, policy: object, draws: bool, devices: list[Place] | None
) -> None:
    x = labelled(3)
    plain, inner = probes(1)[0][0], Inner(draws)
    torch.manual_seed(5)
    seed = draw_seed()
    for chunk, piece in enumerate(x.tensor_split(3)):
        random.seed(layer_seed(seed, chunk, 1))
        inner(plain(piece.requires_grad_())).sum().backward()
    before = random.getstate()
    ours, layer = probes(1)[0][0], Inner(draws)
    torch.manual_seed(5)
    run(Pipe(nn.Sequential(ours, layer), [1, 1], 3, checkpoint=policy, devices=devices), x, entry)
    assert torch.allclose(ours.weight.grad, plain.weight.grad, rtol=1e-13, atol=0)
    assert layer.calls == 3 and layer.replaced == 8 and random.getstate() == before
    assert torch.equal(layer.generator.get_state(), inner.generator.get_state())


# ----------------------------------------------------------------------------------------------------- timelines


@pytest.mark.inline
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
def test_in_eval_mode_backward_runs_through_the_same_lanes_in_the_same_order(
    entry: str, schedule: str, policy: str
) -> None:
    ran = []
    for training in (True, False):
        model, log = probes(3)
        pipe = Pipe(model, [1, 1, 1], chunks=4, schedule=schedule, checkpoint=policy).train(training)
        with pipe.trace() as trace:
            run(pipe, labelled(4), entry)
        ran.append(([(event.action, event.lane) for event in trace.timeline.events], list(log)))
    assert ran[0] == ran[1]
    events, log = ran[0]
    assert len(events) == 24 + len(pairs(log, "R"))


@pytest.mark.parametrize("training", [True, False])
def test_eval_called_between_forward_and_backward_changes_no_recomputation(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    x = torch.randn(6, 3).double()
    grads = []
    for policy in ("never", "always"):
        pipe = Pipe(model, [2, 1], chunks=3, checkpoint=policy).train(training)
        torch.manual_seed(1)
        out = pipe(x)
        pipe.train(not training)
        out.sum().backward()
        assert all(module.training is not training for module in model)
        grads.append([param.grad for param in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *grads))


# --------------------------------------------------------------------------------- a recomputation that differs


class Depends(nn.Module):
    """A layer whose forward depends on something that is neither a buffer nor one of torch's generators."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.state = torch.ones((), dtype=torch.float64)
        self.generators = [torch.Generator().manual_seed(4)]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counter":
            self.calls += 1
            return x * self.calls
        if self.how == "attribute":
            self.state = self.state + 1
            return x * self.state
        return x * torch.rand(x.shape, generator=self.generators[0], dtype=x.dtype)


@pytest.mark.parametrize("how", ["counter", "attribute", "generator in a list"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_recomputation_with_other_numbers_is_right_or_an_error_never_silent(how: str, entry: str) -> None:
    """What such a layer computes the second time is not what the loss was computed from."""
    grads = []
    for policy in ("never", "always"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Depends(how), nn.Linear(3, 1)).double()
        pipe = Pipe(model, [1, 2], chunks=3, checkpoint=policy)
        try:
            run(pipe, torch.linspace(-1, 1, 18).reshape(6, 3).double(), entry)
        except CheckpointError:
            return
        grads.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_another_path_in_the_recomputation_is_an_error_that_says_what_to_do() -> None:
    class Coin(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if pipeline.is_recomputing() else x.sin().cos()

    model, _ = probes(1)
    for create_graph in (False, True):
        for policy in ("always", "never") if create_graph else ("always",):
            pipe = Pipe(nn.Sequential(model[0], Coin()), [1, 1], chunks=2, checkpoint=policy)
            out = pipe(labelled(2)).sum()
            words = r"recomputation of stage 1 \(layer 1\), chunk 0, (took|gave) .*checkpoint='never'"
            with pytest.raises(CheckpointError, match=words):
                torch.autograd.grad(out, list(pipe.parameters()), create_graph=create_graph)


class WritesInput(nn.Module):
    """Writes its input where no version counter shows it."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2.0)
        return x * 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_layer_that_writes_its_input_past_autograd_is_right_or_refused(entry: str) -> None:
    grads = []
    for policy in ("never", "always"):
        model, _ = probes(2)
        pipe = Pipe(nn.Sequential(model[0], WritesInput(), model[1]), [1, 2], 3, checkpoint=policy)
        try:
            run(pipe, labelled(3) * torch.tensor([0.0, 1, 1, 1], dtype=torch.float64), entry)
        except CheckpointError:
            return
        grads.append([param.grad for param in pipe.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_in_place_first_layer_works_in_every_mode_and_leaves_the_users_input_alone(mode: type) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(6, 3)
    expected = model(x.clone())
    for balance in ([3], [1, 2], [1, 1, 1], [2, 1]):
        given = x.clone()
        with mode():
            out = Pipe(model, balance, 3)(given)
        assert torch.allclose(out, expected) and torch.equal(given, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_every_chunk_gets_whole_is_not_written_by_an_earlier_chunk(mode: type) -> None:
    class Adds(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            x, shift = pair
            return x * shift.add_(1.0)

    with mode():
        x, shift = torch.ones(6, 3), torch.ones(3)
        out = Pipe(nn.Sequential(Adds(), nn.Identity()), [1, 1], 3)((x, pipeline.NoChunk(shift)))
    assert torch.equal(out, torch.full((6, 3), 2.0)) and torch.equal(shift, torch.ones(3))


@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_backward_in_inference_mode_gives_all_gradients(policy: str, noisy: bool) -> None:
    """Autograd differentiates there what was recorded outside; so a recomputation has to record it."""
    between = [nn.Dropout(0.5), nn.BatchNorm1d(4)] if noisy else [nn.Tanh(), nn.ReLU()]
    model = nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = Pipe(model, [2, 2], 3, checkpoint=policy)
    for _ in range(4):  # in calls that compare, and in one that does not
        grads = []
        for mode in (torch.enable_grad, torch.inference_mode):
            model.zero_grad()
            torch.manual_seed(1)
            input = x.clone().requires_grad_()
            out = pipe(input).square().sum()
            with mode():
                out.backward()
            grads.append([input.grad, *(param.grad for param in model.parameters())])
        for expected, grad in zip(*grads, strict=True):
            assert expected is not None and grad is not None and torch.equal(expected, grad)


class Constrained(nn.Linear):
    """The max-norm constraint as EEGNet's code writes it: the parameter's data are replaced within the forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.1)
        return super().forward(x)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_forward_that_replaces_a_parameters_data_replaces_it_or_is_refused(entry: str, policy: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), Constrained(3, 3)).double()
    ours = nn.Sequential(nn.Linear(3, 3), Constrained(3, 3)).double()
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(6, 3).double()
    plain(x).sum().backward()
    try:
        run(Pipe(ours, [1, 1], 3, checkpoint=policy), x, entry)
    except RuntimeError:
        return
    for param, reference in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param, reference) and torch.allclose(param.grad, reference.grad)


class Complex(nn.Module):
    """nan in the real part, in the imaginary one, or in some entries of one; the other part is a number."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y, nan = x * self.weight, x * self.weight * float("nan")
        made = {
            "real": (nan, y), "imaginary": (y, nan), "some": (y, torch.where(x > 0, nan, x)), "both": (nan, nan)
        }[self.kind]
        return torch.complex(*made)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("kind", ["real", "imaginary", "some", "both"])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_recomputation_that_gives_the_same_nan_in_complex_numbers_is_the_same(
    kind: str, checkpoint: str, size: int
) -> None:
    module = nn.Sequential(nn.Linear(4, size).double(), Complex(kind, size), nn.Identity())
    pipe = Pipe(module, [1, 2], chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(3):
        pipe(x).abs().nansum().backward()
        loss = pipe.step(x, loss_fn=lambda out, _: torch.view_as_real(out).nan_to_num().square().mean())
        expected = torch.view_as_real(module(x)).nan_to_num().square().mean()
        torch.testing.assert_close(loss.loss, expected.detach())


@pytest.mark.parametrize("part", ["real", "imag"])
def test_complex_values_that_differ_in_one_part_beside_a_nan_differ(part: str) -> None:
    one = torch.complex(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")]))
    other = one.clone()
    getattr(other, part)[0 if part == "imag" else 1] = 2.0
    assert same_values(one, one.clone()) and not same_values(one, other)
