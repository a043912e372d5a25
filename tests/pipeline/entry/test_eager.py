"""A step with an EagerUpdate is the ordinary step, to the bit; each parameter is updated once, and its gradient goes.

The reference is always the same Pipe on a twin model with the optimizer itself, or torch's own functions.
"""

import copy
import itertools
import random
import weakref

import pytest
import torch
from cover import examples
from eager_twins import everything, same, twins
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_probes import outside
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from pipeline import CheckpointError, EagerUpdate, Pipe, is_recomputing
from scheduler import by_name

WIDTH = 4
CLIPS = [None, "two_pass"]


# ------------------------------------------------------------------------------------------------------------- models


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x[:, None])[:, 0]


class Sometimes(nn.Module):
    """Reads its weight only for chunks whose first number is positive; and has another that nobody reads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x @ self.weight if x[0, 0] > 0 else x


class Captures(nn.Module):
    """Reads the weight of another layer, which is none of its own parameters."""

    def __init__(self, weight):
        super().__init__()
        self.captured = (weight,)

    def forward(self, x):
        return x + self.captured[0].mean(0)


class Tanh(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


def tied(first):
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = first.weight
    return layer


def frozen():
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


LAYERS = {
    "linear": lambda first, x: nn.Linear(WIDTH, WIDTH),
    "layer norm": lambda first, x: nn.LayerNorm(WIDTH),
    "batch norm": lambda first, x: nn.BatchNorm1d(WIDTH),
    "dropout": lambda first, x: nn.Dropout(0.3),
    "conv": lambda first, x: Conv(),
    "tanh": lambda first, x: Tanh(),
    "tied": lambda first, x: tied(first),
    "frozen": lambda first, x: frozen(),
    "sometimes": lambda first, x: Sometimes(),
    "captures": lambda first, x: Captures(first.weight),
    "captures x": lambda first, x: Captures(x),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
}


def sequential(*kinds, x=None, seed=0):
    torch.manual_seed(seed)
    first = nn.Linear(WIDTH, WIDTH)
    x = nn.Parameter(torch.randn(6, WIDTH)) if x is None else x
    return nn.Sequential(first, *[LAYERS[kind](first, x) for kind in kinds]).double()


def simple(stages=3, seed=0):
    return sequential(*["linear", "tanh"][: stages - 1] + ["linear"] * (stages - 3), seed=seed)


def batch(rows=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def sum_and_count(output, target):
    kept = target > -0.5
    return ((output - target) ** 2)[kept].sum(), kept.sum()


class Scaled:
    """A loss with a parameter of its own."""

    def __init__(self):
        self.scale = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))

    def __call__(self, output, target):
        return (self.scale * output - target).square().mean()


def eager_if(is_eager, optimizer, **settings):
    return EagerUpdate(optimizer, **settings) if is_eager else optimizer


# ---------------------------------------------------------------------------------------------------- the same numbers


@st.composite
def cases(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6))
    layers = len(kinds) + 1
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "looped-bfs", "interleaved"]))
    most = min(4, layers)
    stages = 2 * draw(st.integers(1, most // 2)) if schedule in ("looped-bfs", "interleaved") else draw(
        st.integers(1, most)
    )
    cuts = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
    balance = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    settings = {
        "balance": balance, "chunks": draw(st.integers(1, 4)), "schedule": schedule,
        "checkpoint": draw(st.sampled_from(["always", "except_last", "never"])),
        "workers": draw(st.sampled_from([None, "threads"])),
    }  # fmt: skip
    return kinds, settings


@settings(max_examples=examples(80))
@given(
    cases(), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(["mean", "count", "scaled"]),
    st.sampled_from([*CLIPS, None]), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_an_eager_step_is_the_ordinary_step_to_the_bit(case, name, loss, clip, training, x_is_ours, whole, seed):
    kinds, settings = case
    draws = "dropout" in kinds

    def run(is_eager):
        x = nn.Parameter(batch(12, seed)[0])
        module = sequential(*kinds, x=x, seed=seed).train(training)
        pipe = Pipe(module, mixes_rows="sometimes" in kinds, **settings)  # that looks at its first row
        loss_fn = {"mean": nn.MSELoss(), "count": sum_and_count, "scaled": Scaled()}[loss]
        of_loss = [loss_fn.scale] if loss == "scaled" else []
        params = [*pipe.parameters(), x, *of_loss]
        if not whole and clip is None:  # a norm over some of the parameters is another matter
            params = params[:1] + params[2:]
        optimizer = OPTIMIZERS[name](params)
        update = eager_if(is_eager, optimizer, clip=clip, max_norm=0.2 if clip else None)
        options = {"clip_grad_norm": 0.2} if clip and not is_eager else {}
        found = []
        for number in range(3):
            torch.manual_seed(number)
            rows, target = batch(12, seed + number)
            given = x if x_is_ours else rows
            step = pipe.step(given, target, loss_fn=loss_fn, optimizer=update, outputs=draws, **options)
            found += [step.loss, torch.rand(1)] + ([step.outputs] if draws else [])
            found += [param.grad is None for param in params]
        return found + everything(module, optimizer, x, *of_loss)

    twins(run)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_eager_step_trains_as_the_plain_loop(name, chunks):
    kinds = ["layer norm", "conv", "tied", "tanh", "linear", "frozen", "captures"]
    plain, module = sequential(*kinds), sequential(*kinds)
    optimizer = OPTIMIZERS[name](plain.parameters())
    update = EagerUpdate(OPTIMIZERS[name](module.parameters()))
    pipe = Pipe(module, [3, 3, 2], chunks)
    for number in range(4):
        x, target = batch(seed=number)
        expected = (plain(x) - target).square().mean()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        step = pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=update)
        torch.testing.assert_close(step.loss, expected.detach(), rtol=1e-11, atol=0)
    for one, other in zip(everything(plain), everything(module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["always", "except_last", "never", lambda stage, chunk: (stage + chunk) % 2 == 0])
def test_every_checkpoint_policy_gives_the_same_bits_in_train_and_eval(policy, training):
    def run(policy, is_eager):
        module = sequential("batch norm", "dropout", "linear", "tied", "tanh").train(training)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        pipe = Pipe(module, [2, 2, 2], 3, checkpoint=policy)
        losses = []
        for number in range(4):
            torch.manual_seed(number)
            x, target = batch(seed=number)
            update = eager_if(is_eager, optimizer)
            losses.append(pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=update).loss)
        return losses + everything(module, optimizer)

    same(run("never", False), run(policy, True))


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize("clip", CLIPS)
def test_spectral_norm_and_batch_norm_advance_exactly_once_a_step(policy, clip):
    def run(is_eager):
        torch.manual_seed(0)
        layers = [nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        module = nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), *layers).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        pipe = Pipe(module, [2, 2], 1, checkpoint=policy)
        options = {"clip_grad_norm": 1e-3} if clip and not is_eager else {}
        update = eager_if(is_eager, optimizer, clip=clip, max_norm=1e-3 if clip else None)
        for number in range(2):
            x, target = batch(seed=number)
            pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=update, **options)
        assert module[1].num_batches_tracked == 2
        return everything(module)

    twins(run)


def test_a_tied_parameter_has_one_step_counter_and_it_counts_steps():
    module = sequential("tanh", "tied", "tied")
    optimizer = torch.optim.Adam(module.parameters())
    pipe = Pipe(module, [1, 1, 1, 1], 3)
    for _ in range(3):
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=EagerUpdate(optimizer))
    assert [int(optimizer.state[param]["step"]) for param in module.parameters()] == [3] * 4
    assert len(optimizer.state) == 4  # the weight, and three biases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_other_types_too(dtype):
    def run(is_eager):
        module = simple().to(dtype)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        x, target = (each.to(dtype) for each in batch())
        pipe = Pipe(module, [1, 1, 1], 3)
        for _ in range(3):
            pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=eager_if(is_eager, optimizer))
        return everything(module, optimizer)

    twins(run)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
def test_a_parameter_gets_its_gradient_in_the_type_that_it_asks_for(grad_dtype, clip):
    def run(is_eager):
        module = simple().bfloat16()
        for param in module.parameters():
            param.grad_dtype = grad_dtype
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        update = eager_if(is_eager, optimizer, clip=clip, max_norm=0.1 if clip else None)
        options = {"clip_grad_norm": 0.1} if clip and not is_eager else {}
        pipe = Pipe(module, [1, 1, 1], 3)
        for number in range(3):
            x, target = (each.bfloat16() for each in batch(seed=number))
            pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=update, **options)
        return everything(module, optimizer)

    twins(run)


@pytest.mark.parametrize("workers", [None, "threads"])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_weight_of_four_stages_gets_their_sums_in_order_divided_by_the_count_of_the_mini_batch(clip, workers):
    def run(is_eager):
        module = sequential("tied", "tanh", "tied", "tied")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip=clip, max_norm=0.1 if clip else None)
        options = {"clip_grad_norm": 0.1} if clip and not is_eager else {}
        pipe = Pipe(module, [1, 2, 1, 1], 4, workers=workers)
        for number in range(3):
            x, target = batch(seed=number)
            x.requires_grad_()
            pipe.step(x, target, loss_fn=sum_and_count, optimizer=update, **options)
        return everything(module, x.grad)

    twins(run)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_weight_that_the_loss_reads_too_is_updated_with_both_parts(clip, schedule):
    def run(is_eager):
        module = simple()

        def regularised(output, target):
            return (output - target).square().mean() + 0.3 * module[1].weight.square().sum()

        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip=clip, max_norm=0.1 if clip else None)
        options = {"clip_grad_norm": 0.1} if clip and not is_eager else {}
        pipe = Pipe(module, [1, 1, 1], 3, schedule=schedule)
        for number in range(2):
            pipe.step(*batch(seed=number), loss_fn=regularised, optimizer=update, **options)
        return everything(module)

    twins(run)


@pytest.mark.parametrize("clip", CLIPS)
def test_deferred_statistics_of_batch_norm_advance_once_a_step(clip):
    def run(is_eager):
        module = sequential("batch norm", "linear")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip=clip, max_norm=0.01 if clip else None)
        options = {"clip_grad_norm": 0.01} if clip and not is_eager else {}
        pipe = Pipe(module, [1, 1, 1], 3, deferred_batch_norm=True)
        for number in range(3):
            pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=update, **options)
        assert module[1].num_batches_tracked == 3
        return everything(module)

    twins(run)


class DrawsLater(nn.Module):
    """Draws random numbers only when told to, which earlier calls could not know."""

    def __init__(self):
        super().__init__()
        self.linear, self.draws = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x):
        return self.linear(x) * torch.rand(()) if self.draws else self.linear(x)


def test_a_layer_that_begins_to_draw_random_numbers_is_not_run_again_after_updates():
    def run(is_eager):
        torch.manual_seed(0)
        module = nn.Sequential(DrawsLater(), nn.Linear(WIDTH, WIDTH)).double()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        pipe = Pipe(module, [1, 1], 2)
        for number in range(5):
            module[0].draws = number >= 2
            pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=eager_if(is_eager, optimizer))
        return everything(module, optimizer, torch.rand(1))

    twins(run)


def test_sparse_gradients_are_updated_as_by_the_optimizer():
    def run(is_eager):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)).double()
        optimizers = [torch.optim.SparseAdam(module[0].parameters()), torch.optim.SGD(module.parameters(), lr=0.1)]
        pipe = Pipe(module, [1, 1], 2)
        for number in range(4):
            tokens = torch.arange(6) * (number + 1) % 5
            update = eager_if(is_eager, optimizers[number % 2])
            pipe.step(tokens, batch()[1], loss_fn=nn.MSELoss(), optimizer=update)
        return everything(module, *optimizers)

    twins(run)


# -------------------------------------------------------------------------------------------- one optimizer, both ways


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_optimizers_state_goes_over_to_ordinary_training_and_back_at_any_step(name):
    def run(switches):
        module = sequential("layer norm", "tied", "tanh", "linear")
        optimizer = OPTIMIZERS[name](module.parameters())
        pipe = Pipe(module, [2, 3], 2)
        for number in range(5):
            update = eager_if(switches and number % 2 == 0, optimizer)
            pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=update)
            if switches:  # through a state_dict, into another optimizer
                state = optimizer.state_dict()
                optimizer = OPTIMIZERS[name](module.parameters())
                optimizer.load_state_dict(state)
        return everything(module, optimizer)

    same(run(False), run(True))


@pytest.mark.parametrize("make", [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10),  # momentum too
])  # fmt: skip
def test_the_learning_rate_is_read_at_the_update_and_schedulers_move_once_a_step(make):
    def run(is_eager):
        module = simple()
        groups = [{"params": module[0].parameters(), "lr": 0.01}, {"params": module[1:].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.5)
        scheduler = make(optimizer)
        update = eager_if(is_eager, optimizer)
        pipe = Pipe(module, [1, 1, 1], 2)
        for number in range(5):
            pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=update)
            scheduler.step()  # warns if it believes that no step was made
        assert scheduler.last_epoch == 5
        return everything(module, optimizer) + scheduler.get_last_lr()

    twins(run)


def test_a_parameter_group_added_later_is_updated_from_then_on():
    def run(is_eager):
        module = simple()
        optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer)
        pipe = Pipe(module, [1, 1, 1], 2)
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
        optimizer.add_param_group({"params": list(module[1].parameters()), "lr": 0.3})
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
        return everything(module)

    twins(run)


def test_groups_are_as_they_were_after_a_step_and_after_one_that_fails():
    module = simple()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    pipe = Pipe(module, [1, 1, 1], 2)
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=EagerUpdate(optimizer))
    optimizer.param_groups[0]["lr"] = "what"
    with pytest.raises(TypeError):
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=EagerUpdate(optimizer))
    assert optimizer.param_groups is groups and all(
        group["params"] is params for group, params in zip(groups, lists, strict=True)
    )
    assert all(param.grad is None for param in module.parameters())


# ------------------------------------------------------------------------------------------------- once, and how early


@settings(max_examples=examples(40))
@given(cases(), st.sampled_from([None, "value", "per_parameter", "two_pass"]))
def test_a_rule_gets_each_parameter_once_with_its_whole_gradient(case, clip):
    kinds, settings = case
    kinds = [kind for kind in kinds if kind != "dropout"]
    layers = len(kinds) + 1
    settings = {**settings, "balance": [layers], "schedule": "gpipe"} if layers < sum(settings["balance"]) else settings
    module, twin = sequential(*kinds), sequential(*kinds)
    settings = {**settings, "mixes_rows": "sometimes" in kinds}  # that looks at its first row
    calls = {}

    def rule(param, grad):
        assert not torch.is_grad_enabled() and not param.grad
        calls.setdefault(param, []).append(grad.clone())

    options = {"clip_value": 1e9} if clip == "value" else {"max_norm": 1e9} if clip else {}
    Pipe(module, **settings).step(*batch(12), loss_fn=nn.MSELoss(), optimizer=EagerUpdate(rule, clip, **options))
    Pipe(twin, **settings).step(*batch(12), loss_fn=nn.MSELoss())
    expected = {name: param.grad for name, param in twin.named_parameters() if param.grad is not None}
    names = {param: name for name, param in module.named_parameters()}
    found = {names[param]: grads for param, grads in calls.items() if param in names}
    assert found.keys() == expected.keys()
    for name, grads in found.items():
        assert len(grads) == 1 and torch.equal(grads[0], expected[name])
    assert all(len(grads) == 1 for grads in calls.values())
    assert all(param.grad is None for param in module.parameters())


class Noting(nn.Module):
    """A layer of its own stage that notes when its backward begins."""

    def __init__(self, stage, notes):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stage, self.notes = stage, notes

    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.notes.append(f"{self.stage}B"))
        return y


def noted(schedule, chunks, stages, devices=None, workers=None):
    """What happened in a step, in order: '2B', a backward of stage 2; '2U', the update of its weight."""
    notes = []
    module = nn.Sequential(*[Noting(stage, notes) for stage in range(stages)]).double()
    by_weight = {layer.linear.weight: layer.stage for layer in module}
    rule = EagerUpdate(lambda param, grad: notes.append(f"{by_weight[param]}U") if param in by_weight else None)
    pipe = Pipe(module, [1] * stages, chunks, schedule=schedule, checkpoint="never", devices=devices, workers=workers)
    step = pipe.step(*batch(8), loss_fn=nn.MSELoss(), optimizer=rule, trace=True)
    return notes, step.timeline


@pytest.mark.inline
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_stage_is_updated_after_its_own_last_backward_and_before_the_one_before_ends(schedule, chunks):
    stages = 4
    notes, timeline = noted(schedule, chunks, stages, devices=["cpu"] * stages)
    for stage in range(stages):
        assert notes.count(f"{stage}U") == 1 and notes.count(f"{stage}B") == chunks
        last = max(index for index, note in enumerate(notes) if note == f"{stage}B")
        assert notes.index(f"{stage}U") > last
    last_of_first = max(index for index, note in enumerate(notes) if note == "0B")
    if (schedule, chunks) != ("zb-h1", 1):  # there all weights come after all inputs
        assert notes.index(f"{stages - 1}U") < last_of_first
    updates = [event for event in timeline.events if str(event.action)[1] == "U"]
    assert sorted(str(event.action)[:2] for event in updates) == [f"{stage}U" for stage in range(stages)]
    for event in updates:
        own = [each for each in timeline.events if each.action.stage == event.action.stage and each is not event]
        assert all(each.end <= event.start for each in own)
        assert event.lane == event.action.stage and event.start <= event.end
    first = min(event.start for event in updates)
    assert first < max(event.start for event in timeline.events if event.action.stage == 0 and event not in updates)


def most_gradients_alive(schedule, stages=6, chunks=3):
    """The most gradients of weights that were alive at a time, in a step that updates at once."""
    readers, given, most = {}, [], [0]

    class Counting(nn.Linear):
        def forward(self, x):
            readers[id(self)] = self.weight  # what stands in for it: its .grad is the sum
            y = super().forward(x)
            y.register_hook(count)
            return y

    def count(*_):
        alive = [reader.grad for reader in readers.values() if reader.grad is not None]
        alive += [grad for grad in (reference() for reference in given) if grad is not None]
        most[0] = max(most[0], len({grad.data_ptr() for grad in alive}))

    def rule(param, grad):
        given.append(weakref.ref(grad))
        count()
        param.sub_(grad, alpha=0.1)

    module = nn.Sequential(*[Counting(WIDTH, WIDTH, bias=False) for _ in range(stages)]).double()
    pipe = Pipe(module, [1] * stages, chunks, devices=["cpu"] * stages, schedule=schedule, checkpoint="never")
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=EagerUpdate(rule))
    assert len(given) == stages and not [reference for reference in given if reference() is not None]
    return most[0]


@pytest.mark.inline
def test_stage_by_stage_only_one_stages_gradients_are_alive_and_chunk_by_chunk_all_are():
    assert most_gradients_alive(by_name("looped-bfs", 1, 3, stages_per_lane=6)) == 1
    assert most_gradients_alive(by_name("gpipe", 6, 3)) >= 5  # the last may be gone when the first comes


# ----------------------------------------------------------------------------------------------------- who gets a .grad


def test_parameters_outside_the_optimizer_and_leaves_of_the_user_are_as_after_an_ordinary_step():
    def run(is_eager):
        module = simple(4)
        mine = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
        module[1] = Captures(mine)
        loss_fn = Scaled()
        x, target = batch()
        x.requires_grad_()
        pipe = Pipe(module, [1, 2, 1], 3)
        optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
        for _ in range(2):
            pipe.step(x, target, loss_fn=loss_fn, optimizer=eager_if(is_eager, optimizer))
        assert all(param.grad is None for param in module.parameters())
        return everything(module, x.grad, mine.grad, loss_fn.scale.grad)

    twins(run)


@pytest.mark.parametrize("leftover", [False, True])
def test_a_failure_at_the_end_leaves_the_inputs_grad_as_it_was(leftover):
    """What x was computed from is updated last, when x's own gradient is there."""
    module, behind = simple(), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
    leaf, target = batch()
    leaf.requires_grad_().grad = torch.ones_like(leaf) if leftover else None

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0] is behind:
                raise ArithmeticError("broken on purpose")
            super().step()

    before = leaf.grad, everything(leaf.grad)
    optimizer = Fails([*module.parameters(), behind], lr=0.1)
    with pytest.raises(ArithmeticError, match="broken on purpose"):
        Pipe(module, [1, 1, 1], 3).step(
            leaf * behind, target, loss_fn=nn.MSELoss(), optimizer=EagerUpdate(optimizer, separable=True)
        )
    assert leaf.grad is before[0] and same(everything(leaf.grad), before[1])
    assert all(param.grad is None for param in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_two_passes_give_the_inputs_gradient_once(max_norm):
    def run(is_eager):
        module = simple()
        x, target = batch()
        x.requires_grad_()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip="two_pass", max_norm=max_norm)
        options = {} if is_eager else {"clip_grad_norm": max_norm}
        Pipe(module, [1, 1, 1], 3).step(x, target, loss_fn=nn.MSELoss(), optimizer=update, **options)
        return everything(module, x.grad)

    twins(run)


@pytest.mark.parametrize("clip", [None, "two_pass"])
def test_without_gradient_lists_what_was_left_alone(clip):
    module = sequential("sometimes", "frozen", "linear")
    aside = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*module.parameters(), aside], weight_decay=0.5)
    update = EagerUpdate(optimizer, clip, max_norm=1.0 if clip else None)
    before = everything(module[1].unread, aside, module[2])
    pipe = Pipe(module, [2, 2], 2, mixes_rows=True)
    assert update.without_gradient == []
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    assert {id(param) for param in update.without_gradient} >= {id(module[1].unread), id(aside)}
    assert not {id(param) for param in update.without_gradient} & {id(param) for param in module[3].parameters()}
    assert not {id(param) for param in update.without_gradient} & {id(param) for param in module[2].parameters()}
    same(before, everything(module[1].unread, aside, module[2]))
    assert aside not in optimizer.state and module[1].unread not in optimizer.state


# ---------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_parameters_hook_acts_once_on_the_whole_gradient(schedule):
    def run(is_eager):
        module = sequential("tanh", "tied", "linear")
        seen = []

        def hook(grad):
            seen.append(grad.clone())
            return grad.clamp(-0.01, 0.02)

        for param in dict.fromkeys(module.parameters()):
            param.register_hook(hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        pipe = Pipe(module, [1, 1, 2], 3, schedule=schedule)
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=eager_if(is_eager, optimizer))
        assert len(seen) == 5
        return everything(module) + sorted(float(grad.sum()) for grad in seen)

    twins(run)


@pytest.mark.parametrize("clip, limits", [
    ("value", {"clip_value": 1e-3}), ("per_parameter", {"max_norm": 1e-3}), ("two_pass", {"max_norm": 1e-3}),
])  # fmt: skip
def test_what_a_hook_keeps_of_a_gradient_is_not_clipped(clip, limits):
    """Of an ordinary step torch clips a copy of what has other references."""
    seen, given = {}, torch.ones(WIDTH, WIDTH, dtype=torch.float64)

    def run(is_eager):
        module = simple()
        module[0].weight.register_hook(lambda grad: seen.setdefault(is_eager, []).append(grad))
        module[1].weight.register_hook(lambda grad: given)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = EagerUpdate(optimizer, clip, **limits) if is_eager else optimizer
        Pipe(module, [1, 1, 1], 3).step(*batch(), loss_fn=nn.MSELoss(), optimizer=optimizer)
        return seen[is_eager][-1:]

    twins(run)
    assert torch.equal(given, torch.ones_like(given))


def test_a_hook_may_give_a_gradient_that_lies_otherwise_in_memory():
    """`.grad` would lie as its parameter does, and a norm is added up in the order of memory."""

    def run(is_eager):
        torch.manual_seed(1)
        conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        conv.weight.register_hook(lambda grad: grad.contiguous() * 1.5)
        module = nn.Sequential(nn.Unflatten(1, (3, 4, 4)), conv, nn.Flatten(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip="two_pass", max_norm=0.1)
        options = {} if is_eager else {"clip_grad_norm": 0.1}
        pipe = Pipe(module, [2, 2])
        data = [(torch.randn(7, 48), torch.randn(7, 2)) for _ in range(5)]
        return [pipe.step(*pair, loss_fn=nn.MSELoss(), optimizer=update, **options).grad_norm for pair in data]

    twins(run)


# ---------------------------------------------------------------------------------------------------------------- clips


@pytest.mark.parametrize("max_norm", [1e-3, 0.3, 1e3])
@pytest.mark.parametrize("name", ["momentum", "adam", "adafactor"])
def test_a_norm_over_all_gradients_clips_as_the_ordinary_step(name, max_norm):
    def run(is_eager):
        module = sequential("batch norm", "dropout", "tied", "tanh", "linear")
        optimizer = OPTIMIZERS[name](module.parameters())
        update = eager_if(is_eager, optimizer, clip="two_pass", max_norm=max_norm)
        options = {} if is_eager else {"clip_grad_norm": max_norm}
        pipe = Pipe(module, [2, 2, 2], 3)
        found = []
        for number in range(3):
            found.append(pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=update, **options).loss)
        assert module[1].num_batches_tracked == 9  # once a chunk
        return found + [torch.rand(1)] + everything(module, optimizer)

    twins(run)


@pytest.mark.parametrize("clip, setting, torchs", [
    ("value", {"clip_value": 0.003}, lambda params: nn.utils.clip_grad_value_(params, 0.003)),
    ("per_parameter", {"max_norm": 0.01}, lambda params: [nn.utils.clip_grad_norm_([each], 0.01) for each in params]),
])  # fmt: skip
def test_value_and_per_parameter_are_torchs_functions_on_the_ordinary_gradients(clip, setting, torchs):
    def run(is_eager):
        module = sequential("layer norm", "tied", "tanh", "linear")
        optimizer = OPTIMIZERS["adamw"](module.parameters())
        update = EagerUpdate(optimizer, clip, **setting)
        pipe = Pipe(module, [2, 3], 2)
        for number in range(3):
            if is_eager:
                pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=update)
                continue
            pipe.step(*batch(seed=number), loss_fn=nn.MSELoss())
            torchs(list(module.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        return everything(module, optimizer)

    twins(run)


class Host(nn.Module):
    """Draws from Python's generator, and notes it where a forward is not a recomputation of another."""

    def __init__(self, drawn):
        super().__init__()
        self.linear, self.note = nn.Linear(WIDTH, WIDTH), drawn.append

    def forward(self, x):
        number = random.random()
        self.note(number)
        return self.linear(x) * number


def test_both_runs_draw_the_same_random_numbers_and_the_next_step_others():
    def run(is_eager):
        drawn = []
        torch.manual_seed(0)
        module = nn.Sequential(Host(drawn), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip="two_pass", max_norm=1e-3)
        options = {} if is_eager else {"clip_grad_norm": 1e-3}
        pipe = Pipe(module, [1, 1, 1], 2, checkpoint="always")
        torch.manual_seed(1)
        random.seed(1)
        losses = [pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update, **options).loss for _ in range(3)]
        assert len(set(drawn)) == 6 and len({float(loss) for loss in losses}) == 3
        return losses + sorted(set(drawn)) + [random.random(), torch.rand(1)] + everything(module, optimizer)

    twins(run)


class Breaks(nn.Module):
    """Raises in the forward or the backward of one chunk of one step."""

    def __init__(self, where, chunk):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.where, self.chunk, self.forwards, self.is_armed = where, chunk, outside(itertools.count()), False
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        self.seen += 1
        is_probe = is_recomputing() and not torch.is_grad_enabled()
        if self.is_armed and not is_probe:
            chunk = next(self.forwards())
            if chunk == self.chunk and self.where == "forward":
                raise ArithmeticError("broken on purpose")
            if chunk == self.chunk:
                y.register_hook(self.fail)
        return y

    def fail(self, grad):
        raise ArithmeticError("broken on purpose")


def breaking(where, chunk, first, clip=None, schedule="gpipe"):
    """A Pipe of three stages whose first or last breaks in its second step; what was before it; its EagerUpdate."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
    broken = Breaks(where, chunk)
    module = nn.Sequential(*[broken, *layers] if first else [*layers, broken]).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    update = EagerUpdate(optimizer, clip, max_norm=None if clip is None else 0.01)
    pipe = Pipe(module, [1, 2, 1], 3, checkpoint="never", schedule=schedule)
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    broken.is_armed = True
    before = everything(module, optimizer)
    with pytest.raises(ArithmeticError, match="on purpose"):
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    broken.is_armed = False
    assert all(param.grad is None for param in module.parameters())
    return pipe, module, optimizer, update, before


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("where, first", [("forward", True), ("forward", False), ("backward", False)])
def test_a_failure_before_the_first_update_leaves_all_as_it_was(where, first, chunk, schedule):
    pipe, module, optimizer, update, before = breaking(where, chunk, first, schedule=schedule)
    assert not update.is_torn
    same(before, everything(module, optimizer))
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)


@pytest.mark.inline
def test_a_failure_in_the_second_run_is_torn():
    pipe, module, optimizer, update, _ = breaking("backward", 5, True, clip="two_pass")
    assert update.is_torn
    weights = everything(module)
    assert torch.equal(module[0].seen, torch.tensor(3.0).double())  # the buffers are put back
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"failed half-way.*6 were updated here; then ArithmeticError.*purpose"):
            pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    same(weights, everything(module))
    update.acknowledge_torn_step()
    assert not update.is_torn
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)


@pytest.mark.inline
def test_loading_the_optimizers_state_ends_a_torn_step():
    pipe, module, optimizer, update, _ = breaking("backward", 5, True, clip="two_pass")
    assert update.is_torn
    optimizer.load_state_dict(optimizer.state_dict())
    assert not update.is_torn
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)


@pytest.mark.inline
def test_loading_the_state_of_a_copied_optimizer_ends_a_torn_step_of_the_copy_alone():
    update = breaking("backward", 5, True, clip="two_pass")[3]
    twin = copy.deepcopy(update)
    assert twin.is_torn
    twin.optimizer.load_state_dict(twin.optimizer.state_dict())
    assert not twin.is_torn and update.is_torn


@pytest.mark.inline
def test_an_optimizer_holds_none_of_the_updates_that_were_made_of_it():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    updates = [EagerUpdate(optimizer) for _ in range(3)]
    references = list(map(weakref.ref, updates))
    updates.clear()
    assert not any(reference() for reference in references)


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_failure_in_the_run_for_norms_updates_nothing(chunk):
    _, module, optimizer, update, before = breaking("backward", chunk, True, clip="two_pass")
    assert not update.is_torn
    same(before, everything(module, optimizer))


# ------------------------------------------------------------------------------------------------------------- refusals


class Aside(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize("arguments, error, words", [
    ((torch.optim.LBFGS([nn.Parameter(torch.ones(1))]),), ValueError, "LBFGS looks at all parameters at once"),
    ((Aside([nn.Parameter(torch.ones(1))], lr=0.1),), ValueError, r"Aside.step is not one of torch.*separable=True"),
    ((3,), TypeError, "update is 3. Give a torch optimizer, or a rule"),
    ((nn.Linear(1, 1),), TypeError, "Give a torch optimizer, or a rule"),
    ((sgd(), "norm"), ValueError, "clip is 'norm'. Use None, 'value'.*known only when the last of them is there"),
    ((sgd(), None, None, 1.0), ValueError, "max_norm is 1.0, but clip is None.*by the norm over all"),
    ((sgd(), None, 1.0), ValueError, "clip_value is 1.0, but clip is None"),
    ((sgd(), "value"), ValueError, "clip_value is None, but clip is 'value'"),
    ((sgd(), "value", 1.0, 1.0), ValueError, "max_norm is 1.0, but clip is 'value'"),
    ((sgd(), "two_pass"), ValueError, "max_norm is None, but clip is 'two_pass'"),
    ((sgd(), "two_pass", 1.0, 1.0), ValueError, "clip_value is 1.0, but clip is 'two_pass'"),
    ((sgd(), "per_parameter", None, 0.0), ValueError, "max_norm is 0.0. Give a number above 0"),
    ((sgd(), "value", -1.0), ValueError, "clip_value is -1.0. Give a number above 0"),
])  # fmt: skip
def test_what_cannot_be_is_refused_when_it_is_made(arguments, error, words):
    with pytest.raises(error, match=words):
        EagerUpdate(*arguments)


def test_an_optimizer_of_somebody_else_steps_if_it_is_said_to_be_separable():
    def run(is_eager):
        module = simple()
        optimizer = Aside(module.parameters(), lr=0.1)
        update = EagerUpdate(optimizer, separable=True) if is_eager else optimizer
        Pipe(module, [1, 1, 1], 2).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
        return everything(module)

    twins(run)


def test_separable_does_not_let_lbfgs_through():
    with pytest.raises(ValueError, match="LBFGS looks at all"):
        EagerUpdate(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), separable=True)


@pytest.mark.parametrize("options, words", [
    ({"clip_grad_norm": 0.5}, r"clip='two_pass', max_norm=0.5"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler leaves the whole step out"),
    ({"grads": "store"}, "grads='store' keeps the gradients for you"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_refused_by_step(options, words):
    module = simple()
    before = everything(module)
    with pytest.raises(ValueError, match=words):
        update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.1))
        Pipe(module, [1, 1, 1]).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update, **options)
    same(before, everything(module))


def step_hook(module, optimizer):
    return optimizer.register_step_post_hook(lambda *_: None)


def step_pre_hook(module, optimizer):
    return optimizer.register_step_pre_hook(lambda *_: None)


def global_hook(module, optimizer):
    return register_optimizer_step_pre_hook(lambda *_: None)


def grad_set(module, optimizer):
    module[1].weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.float64)


def foreign_hook(module, optimizer):
    module[1].weight.register_post_accumulate_grad_hook(lambda param: None)


@pytest.mark.parametrize("prepare, words", [
    (step_hook, "the optimizer has step hooks"),
    (step_pre_hook, "the optimizer has step hooks"),
    (global_hook, "the optimizer has step hooks"),
    (grad_set, "'1.weight' has a .grad already"),
    (foreign_hook, "'1.weight' has post-accumulate hooks"),
])  # fmt: skip
def test_what_would_be_missed_is_refused_before_anything_changes(prepare, words):
    module = simple()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    update = EagerUpdate(optimizer)
    before = everything(module)
    handle = prepare(module, optimizer)
    try:
        with pytest.raises(RuntimeError, match=words):
            Pipe(module, [1, 1, 1]).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    finally:
        if handle is not None:
            handle.remove()
    same(before, everything(module))
    assert not update.is_torn


def test_hooks_that_wait_for_grad_are_refused_on_parameters_that_no_optimizer_holds_too():
    """In an ordinary step they run: they may be another optimizer, which steps in the backward."""
    module = simple()
    foreign_hook(module, None)
    update = EagerUpdate(torch.optim.SGD(module[0].parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="'1.weight' has post-accumulate hooks"):
        Pipe(module, [1, 1, 1]).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)


@pytest.mark.parametrize("clip", CLIPS)
def test_a_loss_that_reaches_nothing_is_refused(clip):
    module = simple().requires_grad_(False)
    update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.1), clip, max_norm=1.0 if clip else None)
    with pytest.raises(RuntimeError, match="does not depend on anything that requires grad"):
        Pipe(module, [1, 1, 1]).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    assert not update.is_torn


def root(output, target):
    return (output - target).square().sum().sqrt()


@pytest.mark.parametrize("clip", CLIPS)
def test_a_loss_that_is_no_mean_is_refused_before_the_first_update(clip):
    module = simple()
    update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.1), clip, max_norm=1.0 if clip else None)
    before = everything(module)
    with pytest.raises(ValueError, match="mean"):
        Pipe(module, [1, 1, 1], 3).step(*batch(), loss_fn=root, optimizer=update)
    assert not update.is_torn
    same(before, everything(module))


class Reentrant(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_layers_with_torchs_reentrant_checkpoint_are_updated_once_and_right(policy, is_tied):
    def run(is_eager):
        module = sequential("linear", "tanh", "tied" if is_tied else "linear")
        module[1] = Reentrant(nn.Sequential(module[1], Tanh()))
        optimizer = OPTIMIZERS["adam"](module.parameters())
        pipe = Pipe(module, [1, 2, 1], 3, checkpoint=policy)
        for number in range(3):
            pipe.step(*batch(seed=number), loss_fn=nn.MSELoss(), optimizer=eager_if(is_eager, optimizer))
        return everything(module, optimizer)

    twins(run)


def test_recomputation_reads_the_weights_from_before_the_update():
    x, target = batch()

    def naive():
        """All forwards, then all backwards, each updating at once what the next one recomputes with."""
        module = sequential("tanh", "tied")
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(updated)
        pairs = zip(x.chunk(3), target.chunk(3), strict=True)
        outputs = [(checkpoint(module, piece, use_reentrant=False), wanted) for piece, wanted in pairs]
        for output, wanted in outputs:
            ((output - wanted).square().mean() / 3).backward()
        return everything(module)

    def updated(param):
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.5)
        param.grad = None

    def run(is_eager):
        module = sequential("tanh", "tied")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        pipe = Pipe(module, [1, 1, 1], 3, schedule="gpipe", checkpoint="always")
        pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=eager_if(is_eager, optimizer))
        return everything(module)

    twins(run)
    wrong = max(float((one - other).abs().max()) for one, other in zip(naive(), run(True), strict=True))
    assert wrong > 1e-3  # and nothing has said so


def test_the_joined_outputs_are_those_of_before_the_update():
    module, twin = simple(), simple()
    x, target = batch()
    update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.5))
    step = Pipe(module, [1, 1, 1], 3).step(x, target, loss_fn=nn.MSELoss(), optimizer=update, outputs=True)
    torch.testing.assert_close(step.outputs, twin(x).detach(), rtol=1e-12, atol=1e-14)
    assert not step.outputs.requires_grad and not step.loss.requires_grad


def test_a_pending_forward_from_before_the_step_is_no_silent_wrongness():
    module = simple()
    x, target = batch()
    pipe = Pipe(module, [1, 1, 1], 3, checkpoint="always")
    pending = pipe(x).square().mean()
    pipe.step(x, target, loss_fn=nn.MSELoss(), optimizer=EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.5)))
    with pytest.raises(RuntimeError):
        pending.backward()


@pytest.mark.inline
def test_a_hook_that_raises_leaves_the_step_torn_only_if_another_was_updated():
    for index, is_torn in ((0, True), (2, False)):
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]).double()
        module[index].weight.register_hook(lambda grad: 1 / 0)
        update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.5))
        with pytest.raises(ZeroDivisionError):
            Pipe(module, [1, 1, 1], 2).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
        assert update.is_torn is is_torn


@pytest.mark.inline
def test_a_failure_of_one_run_after_an_update_leaves_the_step_torn_until_that_is_acknowledged():
    pipe, module, optimizer, update, before = breaking("backward", 2, True)
    assert update.is_torn
    buffers = [buffer.clone() for buffer in module.buffers()]
    assert torch.equal(module[0].seen, torch.tensor(3.0).double())  # put back
    assert module[2].num_batches_tracked == 3
    weights = everything(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"failed half-way.*6 were updated here; then ArithmeticError.*purpose"):
            pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    same(weights, everything(module))
    same(buffers, [*module.buffers()])
    update.acknowledge_torn_step()
    assert not update.is_torn
    pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_two_runs_give_the_inputs_gradient_once(max_norm):
    def run(is_eager):
        module = simple(4)
        mine = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        module[1] = Captures(mine)
        x, target = batch()
        x.requires_grad_()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip="two_pass", max_norm=max_norm)
        options = {} if is_eager else {"clip_grad_norm": max_norm}
        Pipe(module, [1, 2, 1], 3).step(x, target, loss_fn=nn.MSELoss(), optimizer=update, **options)
        return everything(module, x.grad, mine.grad)

    twins(run)


def test_the_norm_is_over_all_parameters_though_the_optimizer_has_some():
    def run(is_eager):
        module = simple()
        optimizer = torch.optim.SGD(module[1:].parameters(), lr=0.1)
        update = eager_if(is_eager, optimizer, clip="two_pass", max_norm=0.01)
        options = {} if is_eager else {"clip_grad_norm": 0.01}
        Pipe(module, [1, 1, 1], 2).step(*batch(), loss_fn=nn.MSELoss(), optimizer=update, **options)
        return everything(module)

    twins(run)


@pytest.mark.parametrize("is_of_loss", [True, False])
def test_a_grad_that_is_set_on_any_parameter_of_the_optimizer_is_refused(is_of_loss):
    module, loss_fn = simple(), Scaled()
    loss_fn.scale.grad = torch.ones((), dtype=torch.float64)
    optimizer = torch.optim.SGD([*module.parameters(), loss_fn.scale], lr=0.1)
    with pytest.raises(RuntimeError, match="has a .grad already"):
        Pipe(module, [1, 1, 1], 2).step(
            *batch(), loss_fn=loss_fn if is_of_loss else nn.MSELoss(), optimizer=EagerUpdate(optimizer)
        )


def test_parameters_behind_the_input_are_updated_too():
    def run(is_eager):
        torch.manual_seed(0)
        before, module = nn.Embedding(5, WIDTH).double(), simple()
        optimizer = torch.optim.SGD([*before.parameters(), *module.parameters()], lr=0.1)
        update = eager_if(is_eager, optimizer)
        pipe = Pipe(module, [1, 1, 1], 2)
        for _ in range(2):
            x = before(torch.arange(6) % 5)
            pipe.step(x, batch()[1], loss_fn=nn.MSELoss(), optimizer=update)
        assert before.weight.grad is None
        return everything(module, before)

    twins(run)


def test_a_norm_over_what_is_behind_the_input_too_is_refused_and_nothing_changes():
    embedding, module = nn.Embedding(5, WIDTH).double(), simple()
    before = everything(module, embedding)
    optimizer = torch.optim.SGD([*embedding.parameters(), *module.parameters()], lr=0.1)
    update = EagerUpdate(optimizer, "two_pass", max_norm=0.1)
    x = embedding(torch.arange(6) % 5)
    with pytest.raises(RuntimeError, match="x was computed from something that requires a gradient.*x.detach"):
        Pipe(module, [1, 1, 1], 2).step(x, batch()[1], loss_fn=nn.MSELoss(), optimizer=update)
    assert not update.is_torn
    assert same(everything(module, embedding), before)


class WritesUnseen(nn.Linear):
    """Its forward writes its weight past the version counters."""

    def forward(self, x):
        y = super().forward(x)
        self.weight.data.mul_(1.01)
        return y


@pytest.mark.parametrize("workers", [None, "threads"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_forward_that_writes_a_weight_unseen_is_refused_before_anything_is_updated(checkpoint, workers):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesUnseen(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    others = [module[0].weight, module[2].weight]
    before = everything(*others)
    update = EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.1))
    pipe = Pipe(module, [1, 1, 1], 3, checkpoint=checkpoint, workers=workers)
    with pytest.raises(CheckpointError):
        pipe.step(*batch(), loss_fn=nn.MSELoss(), optimizer=update)
    assert not update.is_torn
    assert same(everything(*others), before)


# -------------------------------------------------------------------------- weights that a stage reads past autograd


class Peeks(nn.Module):
    """Computes with another layer's weight, of which autograd knows nothing."""

    def __init__(self, layer, how):
        super().__init__()
        self.layer, self.how = [layer], how

    def forward(self, x):
        return x @ self.how(self.layer[0].weight)


PEEKS = {
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "a view": lambda weight: weight.data.t(),
}


def peeking(how, places):
    torch.manual_seed(5)
    last = nn.Linear(WIDTH, WIDTH)
    peeks = Peeks(last, how)
    layers = [nn.Linear(WIDTH, WIDTH), Tanh(), last] if places == "early" else [last, Tanh(), nn.Linear(WIDTH, WIDTH)]
    layers.insert(1 if places == "early" else 2, peeks)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("schedule", ["1f1b", "looped-bfs", "gpipe"])
@pytest.mark.parametrize("how", PEEKS)
def test_a_stage_that_reads_a_later_weight_past_autograd_is_refused_before_any_update(how, schedule):
    model = peeking(PEEKS[how], "early")
    update = EagerUpdate(torch.optim.SGD(model.parameters(), 0.5))
    pipe = Pipe(model, [1, 1, 1, 1], 2, schedule=schedule, checkpoint="never")
    before = everything(model)
    x = torch.randn(4, WIDTH).double()
    words = r"stage 1 .* computes with parameter '3.weight' of a later stage, past autograd .*Use a copy"
    with pytest.raises(RuntimeError, match=words):
        pipe.step(x, x, loss_fn=nn.functional.mse_loss, optimizer=update)
    assert same(before, everything(model)) and not update.is_torn


@pytest.mark.parametrize("places, how", [
    ("late", PEEKS["data"]), ("early", lambda weight: weight.detach().clone()), ("early", lambda weight: weight),
], ids=["earlier", "copy", "differentiated"])  # fmt: skip
def test_a_stage_that_reads_an_earlier_weight_or_a_copy_or_differentiates_by_it_gives_the_ordinary_step(places, how):
    found = []
    for kind in (EagerUpdate, lambda optimizer: optimizer):
        model = peeking(how, places)
        pipe = Pipe(model, [1, 1, 1, 1], 2, checkpoint="never")
        optimizer = kind(torch.optim.SGD(model.parameters(), 0.5))
        for _ in range(3):
            x = torch.linspace(-1, 1, 16).double().reshape(4, WIDTH)
            pipe.step(x, x.sin(), loss_fn=nn.functional.mse_loss, optimizer=optimizer)
        found.append([param.detach() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_zeros_of_forward_mode_within_a_layer_have_no_memory_to_compare():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            return torch.func.jvp(lambda point: (point * self.weight).sin(), (x,), (torch.ones_like(x),))[1]

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Slope(), nn.Linear(4, 2)), [1, 1, 1], 2, checkpoint="never")
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), 0.1))
    for _ in range(3):
        pipe.step(torch.randn(6, 4), loss_fn=lambda output, _: output.square().mean(), optimizer=update)
    assert not update.is_torn


@pytest.mark.parametrize("is_part", [False, True])
def test_parameters_of_two_stages_in_the_same_memory_are_refused_before_the_step(is_part):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[2].weight.data = module[0].weight.data
    if is_part:
        module[2].bias.data = module[0].weight.data[1]
        module[2].weight.data = torch.randn(4, 4)
    pipe, before = Pipe(module, [1, 1, 1], 2), [param.detach().clone() for param in module.parameters()]
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), 0.1))
    with pytest.raises(RuntimeError, match=r"\(stage 0\) and .* \(stage 2\) lie in the same memory.*Tie them as one"):
        pipe.step(torch.randn(6, 4), loss_fn=lambda output, _: output.square().mean(), optimizer=update)
    assert not update.is_torn and all(map(torch.equal, module.parameters(), before))
    two = Pipe(nn.Sequential(module[0], module[2]), [2], 2)
    two.step(torch.randn(6, 4), loss_fn=lambda output, _: output.square().mean(), optimizer=update)
