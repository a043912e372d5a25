"""Law 7, the module: names, loading, moving, copies and whatever wraps one are as with the plain nn.Sequential."""

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from by_chunks import CHECKPOINTS, ByChunks, assert_same_grads, call_seed, same, step_by_chunks, twins
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipeline import CheckpointError, Pipe, Place
from scheduler import Kind, by_name

ROWS, WIDE, CHUNKS = 7, 4, 3
F64 = torch.float64


def net():
    inner = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), act=nn.Tanh()))
    return nn.Sequential(nn.Linear(WIDE, 6), nn.BatchNorm1d(6), inner, nn.Dropout(0.2), nn.Linear(6, 2)).double()


def named_net():
    return nn.Sequential(OrderedDict(stem=nn.Linear(WIDE, 6), norm=nn.BatchNorm1d(6), head=nn.Linear(6, 2))).double()


def batch():
    return torch.randn(ROWS, WIDE, dtype=F64), torch.randn(ROWS, 2, dtype=F64)


def mse(output, target):
    return (output - target).pow(2).mean()


def assert_same_state(ours, theirs):
    assert list(ours.state_dict()) == list(theirs.state_dict())
    wrong = [name for name, tensor in ours.state_dict().items() if not same(tensor, theirs.state_dict()[name])]
    assert not wrong, f"state differs: {wrong}"


def train_both(pipe, theirs, ours_optimizer, theirs_optimizer, steps=2, entry="forward"):
    """A few steps on both; everything of the two must stay equal, bit for bit."""
    for number in range(steps):
        x, y = batch()
        seed = call_seed(100 + number)
        ours_optimizer.zero_grad()
        theirs_optimizer.zero_grad()
        if entry == "forward":
            mse(pipe(x), y).backward()
            reference = ByChunks(theirs, x, CHUNKS, seed)
            reference.backward(mse(reference.output, y))
        else:
            pipe.step(x, y, loss_fn=mse)
            step_by_chunks(theirs, x, y, CHUNKS, mse, seed)
        assert_same_grads(pipe, theirs)
        ours_optimizer.step()
        theirs_optimizer.step()
    assert_same_state(pipe, theirs)


# --------------------------------------------------------------------------------------------------- names, containers


@pytest.mark.parametrize("build", [net, named_net])
@pytest.mark.parametrize("balance", [[1, 1, 1], [1, 2], [3]])
def test_names_are_the_plain_modules(build, balance):
    model = build()
    balance = [*balance[:-1], len(model) - sum(balance[:-1])]
    pipe = Pipe(model, balance, CHUNKS)
    for ours, theirs in (
        (pipe.named_parameters(), model.named_parameters()),
        (pipe.named_buffers(), model.named_buffers()),
    ):
        pairs = list(zip(ours, theirs, strict=True))
        assert pairs and all(one[0] == other[0] and one[1] is other[1] for one, other in pairs)
    assert [name for name, _ in pipe.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert list(dict(pipe.named_children())) == list(dict(model.named_children()))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_names_and_parameters_are_the_same_while_a_graph_is_alive_and_after(checkpoint):
    pipe = Pipe(net(), [2, 2, 1], CHUNKS, checkpoint=checkpoint)
    before = {name: id(param) for name, param in pipe.named_parameters()}
    x, y = batch()
    loss = mse(pipe(x), y)
    assert {name: id(param) for name, param in pipe.named_parameters()} == before
    loss.backward()
    assert {name: id(param) for name, param in pipe.named_parameters()} == before
    pipe.step(x, y, loss_fn=mse)
    assert {name: id(param) for name, param in pipe.named_parameters()} == before


def test_a_pipe_is_indexed_and_iterated_as_the_sequential():
    model = named_net()
    pipe = Pipe(model, [2, 1], CHUNKS)
    assert len(pipe) == 3 and pipe[0] is model[0] and pipe[-1] is model[2] and list(pipe) == list(model)
    assert type(pipe[1:]) is nn.Sequential and list(dict(pipe[1:].named_children())) == ["norm", "head"]
    with pytest.raises(IndexError):
        pipe[3]
    assert [list(dict(stage.named_children())) for stage in pipe.partitions] == [["stem", "norm"], ["head"]]
    plain = pipe.to_sequential()
    assert type(plain) is nn.Sequential and list(plain) == list(model)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert pipe.head is model.head
    assert "balance=[2, 1], chunks=3, checkpoint='except_last'" in repr(pipe) and "(norm): BatchNorm1d" in repr(pipe)


def test_a_layer_that_stands_in_two_places_is_one_layer():
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(WIDE, 4), act, nn.Linear(4, 2), act).double()
    ours, theirs = twins(model)
    pipe = Pipe(ours, [1, 2, 1], CHUNKS)
    assert len(pipe) == 4 and pipe[1] is pipe[3] and list(pipe.state_dict()) == list(model.state_dict())
    x, y = batch()
    mse(pipe(x), y).backward()
    reference = ByChunks(theirs, x, CHUNKS)
    reference.backward(mse(reference.output, y))
    assert_same_grads(pipe, theirs)


def test_a_layer_replaced_by_name_is_the_one_that_computes():
    ours, theirs = twins(nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(3))).double())
    pipe = Pipe(ours, [2, 1], CHUNKS)
    for module in (pipe, theirs):
        torch.manual_seed(5)
        setattr(module, "1", nn.Linear(WIDE, WIDE, dtype=F64))
    x, _ = batch()
    pipe(x).pow(2).sum().backward()
    reference = ByChunks(theirs, x, CHUNKS)
    reference.backward(reference.output.pow(2).sum())
    assert_same_grads(pipe, theirs)


@pytest.mark.parametrize("entry", ["forward", "step", "evaluate"])
def test_a_module_added_to_a_pipe_runs_or_is_refused(entry):
    # On a Sequential it would be one more layer.
    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)).double(), [1, 1], CHUNKS)
    x, _ = batch()
    with pytest.raises((TypeError, ValueError, RuntimeError), match="layers|balance"):
        pipe.extra = nn.Linear(WIDE, 9, dtype=F64)
        if entry == "forward":
            pipe(x)
        elif entry == "step":
            pipe.step(x, loss_fn=lambda output, _: output.mean())
        else:
            pipe.evaluate(x, loss_fn=lambda output, _: output.mean())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_attributes_of_parameters_are_there_in_the_forward(checkpoint):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDE, dtype=F64))
            self.weight.gain = 5.0

        def forward(self, x):
            return x * self.weight * getattr(self.weight, "gain", 1.0)

    model = nn.Sequential(Masked(), Masked())
    x, _ = batch()
    assert same(Pipe(model, [1, 1], CHUNKS, checkpoint=checkpoint)(x), model(x))


# --------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_both_ways_at_any_balance(balance, assign):
    source, plain = net(), net()
    Pipe(source, [3, 2], CHUNKS)(batch()[0])  # so that running statistics are not the initial ones
    pipe = Pipe(net(), balance, CHUNKS)
    state = copy.deepcopy(source.state_dict())
    pipe.load_state_dict(state, assign=assign)
    assert_same_state(pipe, source)
    plain.load_state_dict(pipe.state_dict(), assign=assign)
    assert_same_state(plain, source)


def torchgpipe_state(model):
    """From a real GPipe, or with the keys written by hand where torchgpipe cannot be imported."""
    balance = [2, len(model) - 2]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchgpipe import GPipe
    except ImportError:
        names = list(dict(model.named_children()))
        stage = {name: int(place >= balance[0]) for place, name in enumerate(names)}
        state = model.state_dict().items()
        return OrderedDict((f"partitions.{stage[key.split('.')[0]]}.{key}", value) for key, value in state)
    return GPipe(model, balance, devices=["cpu", "cpu"], chunks=2).state_dict()


@pytest.mark.parametrize("build", [net, named_net])
@pytest.mark.parametrize("balance", [1, 2])
def test_torchgpipes_keys_load(build, balance):
    source = build()
    source(batch()[0])
    state = torchgpipe_state(source)
    assert all(key.startswith("partitions.") for key in state)
    keys = list(state)
    pipe = Pipe(build(), [balance, len(source) - balance], CHUNKS)
    assert str(pipe.load_state_dict(state)) == "<All keys matched successfully>"
    assert_same_state(pipe, source)
    assert list(state) == keys  # the caller's dict is the caller's


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.before, self.body = nn.Linear(WIDE, WIDE, dtype=F64), inner

    def forward(self, x):
        return self.body(self.before(x))


def test_torchgpipes_keys_load_in_a_module_that_holds_the_pipe():
    source = Outer(net())
    state = source.before.state_dict(prefix="before.")
    state.update((f"body.{key}", value) for key, value in torchgpipe_state(source.body).items())
    target = Outer(Pipe(net(), [1, 4], CHUNKS))
    target.load_state_dict(state)
    assert_same_state(target, source)


@pytest.mark.parametrize("strict", [True, False])
def test_keys_that_count_layers_anew_in_each_stage_are_refused(strict):
    """As torch.distributed.pipeline.sync.Pipe saves them: without `strict` layer 0 would get the weights of layer 3."""
    source = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE))
    source(torch.randn(4, WIDE))
    saved = OrderedDict(
        (f"partitions.{stage}.{place}.{name}", value)
        for stage, layers in enumerate([source[:3], source[3:]])
        for place, layer in enumerate(layers)
        for name, value in layer.state_dict().items()
    )
    target = nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE))
    pipe = Pipe(target, [2, 2], CHUNKS)
    for prefix, holder in {"": pipe, "body.": nn.ModuleDict({"body": pipe})}.items():
        state = {f"{prefix}{key}": value for key, value in saved.items()}
        with pytest.raises(RuntimeError, match=f"{prefix}partitions.1.0.weight names {prefix}0.weight, as another key"):
            holder.load_state_dict(state, strict=strict)
        holder.load_state_dict(dict(zip(holder.state_dict(), state.values(), strict=True)))
        assert_same_state(target, source)


class Versioned(nn.Module):
    """Reads older formats by version, as torch's own modules do."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return x * self.weight

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_torchgpipes_state_dicts_keep_the_versions_of_the_layers():
    pytest.importorskip("torchgpipe")
    pipe = Pipe(nn.Sequential(Versioned(), Versioned(), Versioned()), [1, 2], CHUNKS)
    pipe.load_state_dict(torchgpipe_state(nn.Sequential(Versioned(), Versioned(), Versioned())))
    assert torch.equal(pipe[0].weight, torch.arange(3.0))


def test_strict_errors_still_name_what_is_unknown_and_what_is_missing():
    pipe = Pipe(net(), [2, 3], CHUNKS)
    state = torchgpipe_state(net())
    state["partitions.1.9.weight"] = torch.ones(1)
    state["other.bias"] = torch.ones(1)
    del state["partitions.0.0.bias"]
    with pytest.raises(RuntimeError) as error:
        pipe.load_state_dict(state)
    for words in ('Missing key(s) in state_dict: "0.bias"', '"9.weight"', '"other.bias"'):
        assert words in str(error.value)
    assert "size mismatch" not in str(error.value)
    result = pipe.load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.bias"] and set(result.unexpected_keys) == {"9.weight", "other.bias"}


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_weights_assigned_between_two_calls_are_the_ones_that_compute(entry):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint="always")
    train_both(pipe, theirs, *(torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs)), 1, entry)
    other = net().state_dict()
    pipe.load_state_dict(copy.deepcopy(other), assign=True)
    theirs.load_state_dict(copy.deepcopy(other), assign=True)
    train_both(pipe, theirs, *(torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs)), 2, entry)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_weights_assigned_between_forward_and_backward_leave_the_gradient_to_the_old_ones(checkpoint):
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 2)).double())
    x, y = batch()
    pipe = Pipe(ours, [2, 1], CHUNKS, checkpoint=checkpoint)
    old = list(pipe.parameters())
    loss = mse(pipe(x), y)
    pipe.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in pipe.state_dict().items()}, assign=True)
    loss.backward()
    reference = ByChunks(theirs, x, CHUNKS)
    reference.backward(mse(reference.output, y))
    for param, expected in zip(old, theirs.parameters(), strict=True):
        assert same(param.grad, expected.grad)
    assert all(param.grad is None and not param.any() for param in pipe.parameters())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("take", [
    lambda layer: parametrizations.weight_norm(layer),
    lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    lambda layer: delattr(layer, "bias"),
], ids=["weight_norm", "prune", "delattr"])
def test_a_parameter_taken_out_between_forward_and_backward_stays_out(take, checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    pipe = Pipe(model, [2, 1], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    loss = mse(pipe(x), y)
    take(pipe[0])
    names = [name for name, _ in pipe.named_parameters()]
    with suppress(CheckpointError):  # a parametrization has another graph
        loss.backward()
    assert [name for name, _ in pipe.named_parameters()] == names


# -------------------------------------------------------------------------------------------------- moving and casting


CASTS = {
    "to": lambda module: module.to(torch.float32),
    "float": lambda module: module.float(),
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "type": lambda module: module.type(torch.float32),
    "double": lambda module: module.float().double(),
}


@pytest.mark.parametrize("how", CASTS)
def test_casts_are_the_plain_modules(how):
    cast = CASTS[how]
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)
    assert cast(pipe) is pipe
    cast(theirs)
    assert_same_state(pipe, theirs)
    x, y = batch()
    dtype = next(pipe.parameters()).dtype
    seed = call_seed(1)
    mse(pipe(x.to(dtype)), y.to(dtype)).backward()
    reference = ByChunks(theirs, x.to(dtype), CHUNKS, seed)
    reference.backward(mse(reference.output, y.to(dtype)))
    assert_same_grads(pipe, theirs)


MOVES = {
    "to(device)": lambda pipe: pipe.to("meta"),
    "to(device=)": lambda pipe: pipe.to(device="meta"),
    "to(device, dtype)": lambda pipe: pipe.to(torch.device("meta"), torch.float32),
    "to(tensor)": lambda pipe: pipe.to(torch.ones(1, device="meta")),
    "to_empty": lambda pipe: pipe.to_empty(device="meta"),
}


@pytest.mark.parametrize("how", MOVES)
def test_moving_a_pipe_is_refused_with_the_way_to_go(how):
    pipe = Pipe(net(), [2, 3], CHUNKS)
    with pytest.raises(TypeError, match=r"a Pipe places its stages itself, .* on cpu does not move to meta.*devices="):
        MOVES[how](pipe)
    assert next(pipe.parameters()).dtype == F64 and next(pipe.parameters()).device.type == "cpu"


def test_to_the_device_where_all_is_already_is_no_move():
    pipe = Pipe(net(), [2, 3], CHUNKS)
    assert pipe.to("cpu") is pipe and pipe.cpu() is pipe
    assert next(pipe.to("cpu", torch.float32).parameters()).dtype == torch.float32


# --------------------------------------------------------------------------------------------------------------- copies


def pickled(pipe):
    return pickle.loads(pickle.dumps(pipe))


def saved(pipe):
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "object"])
def test_a_copy_computes_alike_and_shares_nothing(how, used, schedule):
    given = by_name("gpipe", 2, CHUNKS) if schedule == "object" else schedule
    pipe = Pipe(net(), [2, 3], CHUNKS, checkpoint="always", schedule=given)
    x, y = batch()
    if used:
        pipe.step(x, y, loss_fn=mse)
    twin = how(pipe)
    assert twin.balance == pipe.balance and twin.chunks == pipe.chunks and twin.checkpoint == pipe.checkpoint
    assert not {id(param) for param in twin.parameters()} & {id(param) for param in pipe.parameters()}
    for each in (pipe, twin):
        each.zero_grad()
        torch.manual_seed(9)
        each.step(x, y, loss_fn=mse)
    assert_same_grads(twin, pipe)
    assert_same_state(twin, pipe)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_copy_made_while_a_graph_is_alive_disturbs_neither(checkpoint):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    seed = call_seed(4)
    loss = mse(pipe(x), y)
    twin = copy.deepcopy(pipe)
    torch.manual_seed(8)
    mse(twin(x), y).backward()
    loss.backward()
    reference = ByChunks(theirs, x, CHUNKS, seed)
    reference.backward(mse(reference.output, y))
    assert_same_grads(pipe, theirs)


def test_a_copy_runs_the_schedule_it_is_given_later():
    # Plans are kept between calls; a copy takes them along.
    pipe = Pipe(net(), [2, 3], CHUNKS, schedule="gpipe")
    x, y = batch()
    pipe.step(x, y, loss_fn=mse)
    twin = copy.deepcopy(pipe)
    for name in ("1f1b", "gpipe"):
        for schedule in (name, by_name(name, 2, CHUNKS)):
            twin.schedule = schedule
            timeline = twin.step(x, y, loss_fn=mse, trace=True).timeline
            for lane, order in enumerate(by_name(name, 2, CHUNKS).orders):
                ran = [event.action for event in timeline.events if event.lane == lane]
                assert tuple(action for action in ran if action.kind is not Kind.R) == order


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("wrapped", ["before", "after"])
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_optimizers_built_before_or_after_wrapping_train_alike(wrapped, entry):
    ours, theirs = twins(net())
    if wrapped == "before":
        optimizer = torch.optim.AdamW(ours.parameters(), lr=0.05)
        pipe = Pipe(ours, [2, 3], CHUNKS)
    else:
        pipe = Pipe(ours, [2, 3], CHUNKS)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    train_both(pipe, theirs, optimizer, torch.optim.AdamW(theirs.parameters(), lr=0.05), 3, entry)


def test_learning_rate_schedulers_and_param_groups_work():
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)
    pairs = []
    for model in (pipe, theirs):
        named = dict(model.named_parameters())
        groups = [{"params": [named.pop("4.weight")], "lr": 0.5}, {"params": list(named.values())}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        pairs.append((optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    for _ in range(3):
        train_both(pipe, theirs, pairs[0][0], pairs[1][0], 1)
        for _, schedule in pairs:
            schedule.step()


@pytest.mark.parametrize("entries", [("forward", "forward"), ("step", "step"), ("forward", "step", "forward")])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_gradients_accumulate_over_calls_without_rescaling(entries, checkpoint):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)
    expected = [torch.zeros_like(param) for param in theirs.parameters()]
    for number, entry in enumerate(entries):
        x, y = batch()
        seed = call_seed(number)
        theirs.zero_grad()
        if entry == "forward":
            mse(pipe(x), y).backward()
            reference = ByChunks(theirs, x, CHUNKS, seed)
            reference.backward(mse(reference.output, y))
        else:
            pipe.step(x, y, loss_fn=mse)
            step_by_chunks(theirs, x, y, CHUNKS, mse, seed)
        expected = [total + param.grad for total, param in zip(expected, theirs.parameters(), strict=True)]
    for param, total in zip(pipe.parameters(), expected, strict=True):
        assert same(param.grad, total)
    pipe.zero_grad()
    assert all(param.grad is None for param in pipe.parameters())


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("calls", [1, 2])
def test_two_optimizers_each_step_their_own(entry, calls):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)
    x, y = batch()
    ours_each = [torch.optim.SGD(list(model.parameters()), lr=0.1) for model in (ours[:2], ours[2:])]
    theirs_each = [torch.optim.SGD(list(model.parameters()), lr=0.1) for model in (theirs[:2], theirs[2:])]
    for number in range(calls):
        seed = call_seed(number)
        if entry == "forward":
            mse(pipe(x), y).backward()
            reference = ByChunks(theirs, x, CHUNKS, seed)
            reference.backward(mse(reference.output, y))
        else:
            pipe.step(x, y, loss_fn=mse)
            step_by_chunks(theirs, x, y, CHUNKS, mse, seed)
        for optimizer in ours_each + theirs_each:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(pipe, theirs)


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_layers_frozen_and_thawed_between_calls(entry, checkpoint):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs)]
    for frozen in ((), (0,), (0, 2), (4,), (0, 1, 2), ()):
        for model in (pipe, theirs):
            for index in range(5):
                model[index].requires_grad_(index not in frozen)
        train_both(pipe, theirs, *optimizers, 1, entry)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("now", [True, False])
def test_requires_grad_changed_between_forward_and_backward_is_the_plain_modules(checkpoint, now):
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 2)).double())
    x, y = batch()
    for model in (ours, theirs):
        model[0].weight.requires_grad_(not now)
    loss = mse(Pipe(ours, [2, 1], CHUNKS, checkpoint=checkpoint)(x), y)
    reference = ByChunks(theirs, x, CHUNKS)
    for model in (ours, theirs):
        model[0].weight.requires_grad_(now)
    loss.backward()
    reference.backward(mse(reference.output, y))
    assert_same_grads(ours, theirs)


def test_weights_made_anew_through_apply_train_alike():
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)

    def anew(module):
        if isinstance(module, nn.Linear):
            torch.manual_seed(module.out_features)
            nn.init.xavier_uniform_(module.weight)
            module.bias = nn.Parameter(torch.zeros_like(module.bias))

    for _ in range(2):
        for model in (pipe, theirs):
            model.apply(anew)
        train_both(pipe, theirs, *(torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs)), 1)


def test_an_average_of_the_weights_is_kept_and_runs():
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True}
    averages = [AveragedModel(each, **options) for each in (pipe, theirs)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs)]
    for _ in range(3):
        train_both(pipe, theirs, *optimizers, 1)
        for average, model in zip(averages, (pipe, theirs), strict=True):
            average.update_parameters(model)
    x, _ = batch()
    with torch.no_grad():
        one, other = (average.eval()(x) for average in averages)
    torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


# --------------------------------------------------------------------------------------------------- mixed precision


def scaled_loop(theirs, optimizer, scaler, x, y, seed, clip):
    scaled = step_by_chunks(theirs, x, y, CHUNKS, lambda output, target: scaler.scale(mse(output, target)), seed)
    if clip is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaled


def scaler_pair():
    return [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]


@pytest.mark.parametrize("entry", ["forward", "step", "step with clip"])
def test_a_grad_scaler_scales_steps_and_grows_alike(entry):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)
    one, other = scaler_pair()
    ours_optimizer, theirs_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs))
    clip = 0.05 if entry == "step with clip" else None
    for number in range(4):
        x, y = batch()
        seed = call_seed(number)
        if entry == "forward":
            one.scale(mse(pipe(x), y)).backward()
            one.step(ours_optimizer)
            one.update()
            ours_optimizer.zero_grad()
        else:
            pipe.step(x, y, loss_fn=mse, optimizer=ours_optimizer, scaler=one, clip_grad_norm=clip)
        scaled_loop(theirs, theirs_optimizer, other, x, y, seed, clip)
        assert all(param.grad is None for param in pipe.parameters())
    assert one.get_scale() == other.get_scale() == 2.0**12
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("entry", ["forward", "step", "step with clip"])
def test_a_grad_scaler_skips_the_step_of_a_gradient_that_is_not_finite(entry):
    pipe = Pipe(net(), [2, 3], CHUNKS)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler, _ = scaler_pair()
    before = [param.detach().clone() for param in pipe.parameters()]
    x, y = batch()
    y[2, 0] = float("inf")
    if entry == "forward":
        scaler.scale(mse(pipe(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    else:
        clip = 0.05 if entry == "step with clip" else None
        pipe.step(x, y, loss_fn=mse, optimizer=optimizer, scaler=scaler, clip_grad_norm=clip)
    assert scaler.get_scale() == 2.0**9
    assert all(same(param.detach(), old) for param, old in zip(pipe.parameters(), before, strict=True))
    y[2, 0] = 0.0
    pipe.step(x, y, loss_fn=mse, optimizer=optimizer, scaler=scaler)
    assert not all(same(param.detach(), old) for param, old in zip(pipe.parameters(), before, strict=True))


@pytest.mark.parametrize("clip", [1e-3, 1e3])
@pytest.mark.parametrize("grads", ["param", "store"])
def test_clip_grad_norm_in_a_step_is_torchs(clip, grads):
    ours, theirs = twins(net())
    pipe = Pipe(ours, [2, 3], CHUNKS)
    ours_optimizer, theirs_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, theirs))
    x, y = batch()
    seed = call_seed(6)
    if grads == "store":
        pipe.step(x, y, loss_fn=mse, clip_grad_norm=clip, grads="store").grads.apply(ours_optimizer)
    else:
        pipe.step(x, y, loss_fn=mse, clip_grad_norm=clip, optimizer=ours_optimizer)
    step_by_chunks(theirs, x, y, CHUNKS, mse, seed)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    theirs_optimizer.step()
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-13, atol=1e-15)


# ------------------------------------------------------------------------------------------------- what wraps a module


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_functional_call_computes_with_the_given_tensors(checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    pipe = Pipe(model, [2, 1], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    scale = torch.tensor(1.5, dtype=F64, requires_grad=True)
    found = []
    for module in (pipe, model):
        given = {name: param * scale for name, param in model.named_parameters()}  # no leaves
        output = torch.func.functional_call(module, given, (x,))
        found.append(torch.autograd.grad(mse(output, y), [scale, *model.parameters()]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert all(type(param) is nn.Parameter for param in pipe.parameters())


def test_functional_call_writes_the_given_buffers_and_not_the_modules():
    model = net()
    pipe = Pipe(model, [2, 3], CHUNKS, checkpoint="always")
    x, y = batch()
    given = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    output = torch.func.functional_call(pipe, given, (x,))
    assert int(given["1.num_batches_tracked"]) == CHUNKS
    mse(output, y).backward()
    assert int(given["1.num_batches_tracked"]) == CHUNKS
    assert all(same(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_compiled_layers_give_the_same_numbers(backend, checkpoint):
    layers = [nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
    ours, theirs = twins(nn.Sequential(*layers).double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        torch.compiler.reset()
        compiled = [torch.compile(ours[:2], backend=backend), ours[2], torch.compile(ours[3:], backend=backend)]
        pipe = Pipe(nn.Sequential(*compiled), [1, 1, 1], CHUNKS, checkpoint=checkpoint)
        for _ in range(2):
            x, y = batch()
            ours.zero_grad()
            theirs.zero_grad()
            mse(pipe(x), y).backward()
            pipe.step(x, y, loss_fn=mse)
            for _ in range(2):
                mse(theirs(x), y).backward()
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("entry", ["backward", "step", "evaluate"])
def test_within_a_compiled_function_a_pipe_runs_as_without(entry, workers):
    """Else dynamo would raise within step, and compile the engine frame by frame in backward()."""
    model = nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    pipe = Pipe(model, [2, 1], CHUNKS, devices=[Place(torch.device("cpu"), name) for name in "ab"], workers=workers)
    x, y = batch()

    def trained():
        pipe.zero_grad()
        if entry != "backward":
            return getattr(pipe, entry)(x, y, loss_fn=mse).loss
        loss = mse(pipe(x), y)
        loss.backward()
        return loss.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        torch.compiler.reset()
        compiled = torch.compile(trained, backend="eager")
        for _ in range(5):  # stages overlap from the third call on
            found = [(run(), *[param.grad for param in model.parameters()]) for run in (trained, compiled)]
            assert all(one is other is None or same(one, other) for one, other in zip(*found, strict=True))


def test_a_pipe_can_be_a_part_of_a_model():
    ours, theirs = twins(Outer(net()))
    ours.body = Pipe(ours.body, [2, 3], 1)
    x, y = batch()
    torch.manual_seed(0)
    ours.train(False)(x)
    for model in (ours, theirs):
        mse(model.eval()(x), y).backward()
    for (name, one), (other_name, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other_name and same(one.grad, other.grad)


@pytest.mark.parametrize("place", ["child", "module list"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_child_replaced_between_forward_and_backward_gets_no_gradient_or_is_refused(checkpoint, place):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.children_ = nn.ModuleList([nn.Linear(WIDE, WIDE), nn.Tanh()])

        def forward(self, x):
            for child in self.children_:
                x = child(x)
            return x

    first = Held() if place == "module list" else nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh())
    ours, theirs = twins(nn.Sequential(first, nn.Linear(WIDE, 2)).double())
    x, y = batch()
    loss = mse(Pipe(ours, [1, 1], CHUNKS, checkpoint=checkpoint)(x), y)
    holder = ours[0].children_ if place == "module list" else ours[0]
    old, holder[0] = holder[0], nn.Linear(WIDE, WIDE, dtype=F64)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "chang" in str(error) or "another path" in str(error)
        return
    reference = ByChunks(theirs, x, CHUNKS)
    reference.backward(mse(reference.output, y))
    expected = theirs[0].children_[0] if place == "module list" else theirs[0][0]
    assert same(old.weight.grad, expected.weight.grad) and holder[0].weight.grad is None


def test_layers_may_have_the_names_of_attributes_of_a_pipe():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    names = [name for name in dir(Pipe(model, [1, 1])) if name[0] != "_" and not hasattr(nn.Sequential(), name)]
    assert {"balance", "chunks", "step", "devices"} < set(names)
    plain = nn.Sequential(OrderedDict([(name, nn.Linear(2, 2).double()) for name in names]))
    pipe, x = Pipe(copy.deepcopy(plain), [2, len(names) - 2], chunks=2), torch.rand(4, 2, dtype=torch.float64)
    assert torch.equal(pipe(x), plain(x)) and list(pipe.state_dict()) == list(plain.state_dict())
    pipe.load_state_dict(plain.state_dict())
    parameters = dict(pipe.named_parameters())
    for name in names:
        assert pipe.get_submodule(name) is pipe._modules[name]
        assert pipe.get_parameter(f"{name}.weight") is parameters[f"{name}.weight"]
