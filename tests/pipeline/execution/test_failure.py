"""Law 8: an exception keeps its type, names its action, and leaves everything as it was; lost gradients are errors."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from by_chunks import CHECKPOINTS, ByChunks, assert_same_grads, call_seed, same, step_by_chunks, twins
from pipeline_probes import outside
from torch import nn

from pipeline import CheckpointError, Pipe, StuckError, is_recomputing
from pipeline.execution.engine import merged_order, needs_of
from scheduler import Action, Kind

ROWS, WIDE, CHUNKS = 7, 4, 3
F64 = torch.float64
SCHEDULES = ("gpipe", "1f1b")


class Trouble(Exception):
    """Of the user."""


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.fuse.burn("backward")
        return grad, None


class Fuse(nn.Module):
    """Identity that raises at the n-th forward, forward of a probe, recomputation or backward once it is set."""

    def __init__(self):
        super().__init__()
        self.state = outside(SimpleNamespace(where=None, count=0, error=Trouble))
        self.generator = torch.Generator().manual_seed(11)

    def set(self, where, count, error=Trouble):
        vars(self.state()).update(where=where, count=count, error=error)

    def burn(self, where):
        state = self.state()
        if where == state.where:
            state.count -= 1
            if state.count == 0:
                state.where = None  # once: the next call works
                raise state.error("burnt")

    def forward(self, x):
        repeats = "recomputation" if torch.is_grad_enabled() else "probe"
        self.burn(repeats if is_recomputing() else "forward")
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return InBackward.apply(x, self) + 0.01 * noise


class Counter(nn.Module):
    """A buffer that is another tensor after each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen = self.seen + len(x)
        return x


def net():
    front = [nn.Linear(WIDE, 6), nn.BatchNorm1d(6), Counter()]
    return nn.Sequential(*front, nn.Linear(6, 6), Fuse(), nn.Dropout(0.3), nn.Linear(6, 2)).double()


def batch():
    return torch.randn(ROWS, WIDE, dtype=F64), torch.randn(ROWS, 2, dtype=F64)


def mse(output, target):
    return (output - target).pow(2).mean()


def everything(pipe):
    """All that a failed call must leave as it was."""
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    state |= {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
    return state


def assert_as_before(pipe, before, identities):
    now = everything(pipe)
    assert list(now) == list(before)
    wrong = [name for name, value in now.items() if not same(value, before[name])]
    assert not wrong, f"changed by the failed call: {wrong}"
    assert {name: id(param) for name, param in pipe.named_parameters()} == identities
    assert all(type(param) is nn.Parameter for param in pipe.parameters())


def run(entry, pipe, x, y):
    return mse(pipe(x), y).backward() if entry == "forward" else pipe.step(x, y, loss_fn=mse)


WHERE = {  # where it fails, how often it gets there first, the note
    ("forward", 2): "stage 1 (layers 3..4), chunk 1, 1F1",
    ("recomputation", 1): "stage 1 (layers 3..4), chunk 0, 1B0",
    ("recomputation", 3): "stage 1 (layers 3..4), chunk 2, 1B2",
    ("backward", 2): "stage 1 (layers 3..4), chunk 1, 1B1",
}


class MuteError(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("where,count", WHERE)
def test_an_exception_whose_message_cannot_be_had_is_raised_as_it_is(where, count, checkpoint):
    if where != "recomputation" or checkpoint == "always":
        pipe = Pipe(net(), [3, 2, 2], CHUNKS, checkpoint=checkpoint)
        pipe[4].set(where, count, MuteError)
        with pytest.raises(MuteError):
            run("step", pipe, *batch())


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("where,count", WHERE)
def test_an_exception_in_an_action_names_it_and_leaves_everything_as_before(where, count, entry, schedule, error):
    checkpoint = "always" if where == "recomputation" else "never"
    ours = net()
    pipe = Pipe(ours, [3, 2, 2], CHUNKS, schedule=schedule, checkpoint=checkpoint)
    x, y = batch()
    run(entry, pipe, x, y)  # there are gradients, moved buffers
    identities = {name: id(param) for name, param in pipe.named_parameters()}
    loss = mse(pipe(x), y) if entry == "forward" and where != "forward" else None
    before = everything(pipe)
    pipe[4].set(where, count, error)
    generator = torch.default_generator.get_state()
    with pytest.raises(error, match="burnt") as caught:
        run(entry, pipe, x, y) if loss is None else loss.backward()
    assert caught.type is error
    *layer, action = caught.value.__notes__
    assert action == WHERE[where, count] and layer == ([] if where == "backward" else ["layer 4 (Fuse)"])
    assert_as_before(pipe, before, identities)
    after = torch.default_generator.get_state()
    torch.default_generator.set_state(generator)
    if loss is None:
        torch.empty((), dtype=torch.int64).random_()  # the one draw of the call
    assert torch.equal(after, torch.default_generator.get_state())


@pytest.mark.parametrize("entry", ["forward", "step", "evaluate"])
def test_a_failed_call_leaves_the_generators_that_modules_hold(entry):
    pipe = Pipe(net(), [3, 2, 2], CHUNKS)
    state = pipe[4].generator.get_state()
    pipe[4].set("forward", 2)
    with pytest.raises(Trouble):
        if entry == "evaluate":
            pipe.evaluate(*batch(), loss_fn=mse)
        else:
            run(entry, pipe, *batch())
    assert torch.equal(pipe[4].generator.get_state(), state)


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("where,count", WHERE)
def test_the_call_after_a_failed_one_is_right(where, count, entry):
    checkpoint = "always" if where == "recomputation" else "never"
    ours, theirs = twins(net())
    pipe = Pipe(ours, [3, 2, 2], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    if entry == "forward" and where != "forward":
        loss = mse(pipe(x), y)
        pipe[4].set(where, count)
        with pytest.raises(Trouble):
            loss.backward()
        ByChunks(theirs, x, CHUNKS)  # that forward did happen: buffers and the private generator moved
    else:
        pipe[4].set(where, count)
        with pytest.raises(Trouble):
            run(entry, pipe, x, y)
        pipe[4].generator.manual_seed(11)  # its state after a failure is the matter of another test
    seed = call_seed(2)
    if entry == "forward":
        run(entry, pipe, x, y)
        reference = ByChunks(theirs, x, CHUNKS, seed)
        reference.backward(mse(reference.output, y))
    else:
        run(entry, pipe, x, y)
        step_by_chunks(theirs, x, y, CHUNKS, mse, seed)
    assert_same_grads(pipe, theirs)
    for name, buffer in pipe.named_buffers():
        assert same(buffer, dict(theirs.named_buffers())[name]), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_an_exception_in_the_loss_names_the_last_stage(schedule, chunk):
    pipe = Pipe(net(), [3, 2, 2], CHUNKS, schedule=schedule)
    x, y = batch()
    before, identities = everything(pipe), {name: id(param) for name, param in pipe.named_parameters()}
    wanted = y.tensor_split(CHUNKS)[chunk]

    def loss_fn(output, target):
        if torch.equal(target, wanted):
            raise Trouble("in the loss")
        return mse(output, target)

    with pytest.raises(Trouble, match="in the loss") as caught:
        pipe.step(x, y, loss_fn=loss_fn)
    of_loss = f"loss_fn, of {len(wanted)} of the {len(y)} rows"
    assert caught.value.__notes__ == [of_loss, f"stage 2 (layers 5..6), chunk {chunk}, 2B{chunk}"]
    assert_as_before(pipe, before, identities)


@pytest.mark.parametrize("entry", ["evaluate", "no_grad"])
def test_a_failed_evaluation_leaves_modes_and_buffers(entry):
    pipe = Pipe(net(), [3, 2, 2], CHUNKS)
    pipe[1].eval()
    x, y = batch()
    before, identities = everything(pipe), {name: id(param) for name, param in pipe.named_parameters()}
    flags = [module.training for module in pipe.modules()]
    pipe[4].set("forward", 3)
    with pytest.raises(Trouble) as caught:
        if entry == "evaluate":
            pipe.evaluate(x, y, loss_fn=mse)
        else:
            with torch.no_grad():
                pipe(x)
    assert caught.value.__notes__ == ["layer 4 (Fuse)", "stage 1 (layers 3..4), chunk 2, 1F2"]
    assert [module.training for module in pipe.modules()] == flags
    assert_as_before(pipe, before, identities)


class Unjoinable(nn.Module):
    on = True

    def forward(self, x):
        return x.mean() if self.on else x


@pytest.mark.parametrize("entry", ["forward", "step with outputs", "no_grad"])
def test_an_output_that_cannot_be_joined_leaves_everything_as_before(entry):
    last = Unjoinable()
    pipe = Pipe(nn.Sequential(*net(), last), [3, 2, 3], CHUNKS)
    x, y = batch()
    last.on = False
    for _ in range(2):  # a third step no longer compares the loss on the joined output
        pipe.step(x, y, loss_fn=mse, outputs=True)
    last.on = True
    before, identities = everything(pipe), {name: id(param) for name, param in pipe.named_parameters()}
    with pytest.raises(ValueError, match="cannot be joined"):
        if entry == "forward":
            pipe(x)
        elif entry == "no_grad":
            with torch.no_grad():
                pipe(x)
        else:
            pipe.step(x, y, loss_fn=lambda output, _: output, outputs=True)
    assert_as_before(pipe, before, identities)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_second_backward_after_a_failed_one_is_right_or_refused(checkpoint, retain, count):
    # Some chunks are spent by then: leaving them out would be wrong and silent.
    layers = [nn.Linear(WIDE, 6), Fuse(), nn.Linear(6, 2)]
    ours, theirs = twins(nn.Sequential(*layers).double())
    x, _ = batch()
    seed = call_seed(1)
    loss = Pipe(ours, [1, 2], CHUNKS, checkpoint=checkpoint)(x).sum()  # saves nothing itself
    ours[1].set("backward", count)
    with pytest.raises(Trouble):
        loss.backward(retain_graph=retain)
    assert all(param.grad is None for param in ours.parameters())
    try:
        loss.backward()
    except RuntimeError as error:
        assert not retain and "backward" in str(error)
        return
    reference = ByChunks(theirs, x, CHUNKS, seed)
    reference.backward(reference.output.sum())
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_failed_call_keeps_nothing_alive(entry):
    pipe = Pipe(net(), [3, 2, 2], CHUNKS, checkpoint="never")
    seen = []
    pipe[3].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    pipe[4].set("forward", 3)
    with pytest.raises(Trouble):
        run(entry, pipe, *batch())
    gc.collect()
    assert len(seen) == 3 and all(ref() is None for ref in seen)


def test_an_optimizer_that_raises_leaves_the_weights():
    class Bad(torch.optim.SGD):
        def step(self, closure=None):
            raise Trouble("in the optimizer")

    pipe = Pipe(net(), [3, 2, 2], CHUNKS)
    before = [param.detach().clone() for param in pipe.parameters()]
    with pytest.raises(Trouble, match="in the optimizer"):
        pipe.step(*batch(), loss_fn=mse, optimizer=Bad(pipe.parameters(), lr=0.1))
    assert all(same(param.detach(), old) for param, old in zip(pipe.parameters(), before, strict=True))


class Fails(torch.optim.SGD):
    """Raises in its step, once, when it is armed."""

    error = None

    def step(self, closure=None):
        error, self.error = self.error, None
        if error is not None:
            raise error("in the optimizer")
        return super().step()


class WantsAClosure(torch.optim.SGD):
    """As optimizers do that evaluate the loss themselves."""

    def step(self, closure):
        return super().step(closure)


class BadScaler(torch.amp.GradScaler):
    """Raises where it unscales, once."""

    burnt = False

    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        if not self.burnt:
            self.burnt = True
            raise Trouble("in the scaler")


def fail_in_optimizer(pipe, x, error=Trouble):
    optimizer = Fails(pipe.parameters(), lr=0.1)
    optimizer.error = error
    return {"optimizer": optimizer}


def fail_in_scaler(pipe, x, scaler=BadScaler, error=None, clip=None):
    optimizer = Fails(pipe.parameters(), lr=0.1)
    optimizer.error = error
    return {"optimizer": optimizer, "scaler": scaler("cpu"), "clip_grad_norm": clip}


def fail_in_hook(pipe, x, optimizer=None):
    """A post-accumulate hook raises, once, when some parameters have their `.grad`."""
    armed = [True]

    def burn(param):
        if armed:
            armed.pop()
            raise Trouble("in a hook")

    pipe[3].weight.register_post_accumulate_grad_hook(burn)
    return {} if optimizer is None else {"optimizer": optimizer(pipe.parameters(), lr=0.1)}


def fail_behind_input(pipe, x):
    """The gradient of x goes on to what x was computed from, and fails there."""
    armed = [True]

    def burn(grad):
        if armed:
            armed.pop()
            raise Trouble("behind x")

    x.grad_fn.next_functions[0][0].variable.register_hook(burn)
    return {}


def fail_at_end(pipe, x):
    return {"optimizer": WantsAClosure(pipe.parameters(), lr=0.1)}


LATE = {  # what raises when forward and backward have gone well
    "the optimizer": fail_in_optimizer,
    "an interrupt in the optimizer": lambda pipe, x: fail_in_optimizer(pipe, x, KeyboardInterrupt),
    "an optimizer that wants a closure": fail_at_end,
    "the scaler unscales": fail_in_scaler,
    "the scaler unscales to clip": lambda pipe, x: fail_in_scaler(pipe, x, clip=1.0),
    "the scaler steps": lambda pipe, x: fail_in_scaler(pipe, x, torch.amp.GradScaler, Trouble),
    "the scaler steps, clipped": lambda pipe, x: fail_in_scaler(pipe, x, torch.amp.GradScaler, Trouble, 1.0),
    "a hook": fail_in_hook,
    "a hook, with an optimizer": lambda pipe, x: fail_in_hook(pipe, x, torch.optim.SGD),
    "behind the input": fail_behind_input,
}


@pytest.mark.parametrize("leftover", [False, True], ids=["no .grad", "a .grad to add to"])
@pytest.mark.parametrize("what", LATE)
def test_a_failure_after_the_backward_leaves_grads_and_buffers_so_that_the_next_step_is_right(what, leftover):
    ours, theirs = twins(net())
    source, y = batch()
    pipe, twin = Pipe(ours, [3, 2, 2], CHUNKS), Pipe(theirs, [3, 2, 2], CHUNKS)
    leaf = source.requires_grad_()
    x = leaf if "input" not in what else leaf * 1.0
    if leftover:
        for run_on in (pipe, twin):
            run_on.step(*batch_of(5), loss_fn=mse)
        leaf.grad = torch.ones_like(leaf)
    options = LATE[what](pipe, x)
    identities = {name: id(param) for name, param in pipe.named_parameters()}
    grads = [(param, param.grad) for param in [*pipe.parameters(), leaf]]
    before, of_leaf = everything(pipe), None if leaf.grad is None else leaf.grad.clone()
    generator = pipe[4].generator.get_state()
    with pytest.raises((Trouble, KeyboardInterrupt, TypeError), match="in |behind x|closure"):
        pipe.step(x, y, loss_fn=mse, **options)
    assert_as_before(pipe, before, identities)
    assert same(leaf.grad, of_leaf) and all(param.grad is grad for param, grad in grads)
    assert torch.equal(pipe[4].generator.get_state(), generator)

    found = []
    for run_on in (pipe, twin):
        torch.manual_seed(3)
        optimizer = options.get("optimizer") if run_on is pipe else None
        if not isinstance(optimizer, Fails):
            optimizer = torch.optim.SGD(run_on.parameters(), lr=0.1)
        scaler = options.get("scaler")
        scaler = torch.amp.GradScaler("cpu") if scaler and run_on is twin else scaler
        run_on.step(source.detach(), y, loss_fn=mse, optimizer=optimizer, scaler=scaler)
        assert all(param.grad is None for param in run_on.parameters())
        found.append(run_on.state_dict().values())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def batch_of(seed):
    torch.manual_seed(seed)
    return batch()


def test_a_step_with_an_optimizer_adds_to_the_grads_of_earlier_mini_batches():
    ours, theirs = twins(small())
    pipe = Pipe(ours, [2, 2], CHUNKS)
    pipe.step(*batch_of(1), loss_fn=mse)
    mse(pipe(batch_of(2)[0]), batch_of(2)[1]).backward()
    pipe.step(*batch_of(3), loss_fn=mse, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    for seed in (1, 2, 3):
        x, y = batch_of(seed)
        mse(theirs(x), y).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# --------------------------------------------------------------------------------- changed between F and recomputation


def small(frozen=False):
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model = nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), inner, nn.Linear(6, 2)).double()
    model[2][0].weight.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_parameter_changed_in_place_before_its_recomputation_is_named(frozen, create_graph):
    pipe = Pipe(small(frozen), [2, 2], CHUNKS, checkpoint="always")
    x, y = batch()
    loss = mse(pipe(x), y)
    with torch.no_grad():
        pipe[2][0].weight.mul_(1.1)
    words = r"parameter '2\.0\.weight' .*changed in place between the forward and the recomputation"
    with pytest.raises(CheckpointError, match=words):
        torch.autograd.grad(loss, [pipe[0].weight], create_graph=create_graph)


@pytest.mark.parametrize("change", ["optimizer", "load_state_dict", "frozen mul_"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_weights_changed_before_the_backward_are_an_error_in_every_mode(change, checkpoint):
    ours = small()
    ours[0].bias.requires_grad_(change != "frozen mul_")
    pipe = Pipe(ours, [2, 2], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    mse(pipe(x), y).backward()
    loss = mse(pipe(x), y)
    if change == "optimizer":
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    elif change == "load_state_dict":
        pipe.load_state_dict(small().state_dict())
    else:
        with torch.no_grad():
            pipe[2][0].weight.mul_(1.1)
    before = {name: param.grad.clone() for name, param in pipe.named_parameters() if param.grad is not None}
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
        loss.backward()
    assert all(same(param.grad, before.get(name)) for name, param in pipe.named_parameters())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_an_input_changed_in_place_before_the_backward_is_an_error(checkpoint, create_graph):
    pipe = Pipe(small(), [2, 2], CHUNKS, checkpoint=checkpoint)
    x, y = batch()
    loss = mse(pipe(x), y)
    x.add_(1)
    with pytest.raises(RuntimeError, match="input .*changed in place|modified by an inplace operation"):
        torch.autograd.grad(loss, list(pipe.parameters()), create_graph=create_graph)


def test_an_input_changed_in_place_is_named_by_stage_and_shape():
    pipe = Pipe(small(), [2, 2], CHUNKS, checkpoint="always")
    x, y = batch()
    loss = mse(pipe(x), y)
    x.add_(1)
    words = r"input of stage 0 \(layers 0..1\) \(shapes \[\[3, 4\]\]\) was changed in place.*chunk 0.*clone"
    with pytest.raises(CheckpointError, match=words):
        loss.backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_output_changed_in_place_is_right_or_torchs_own_error(checkpoint, chunks):
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 6), nn.Linear(6, 2), nn.Tanh()).double())
    x, _ = batch()
    try:
        Pipe(ours, [1, 2], chunks, checkpoint=checkpoint)(x).mul_(2).sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    reference = ByChunks(theirs, x, chunks)
    reference.backward((reference.output * 2).sum())
    assert_same_grads(ours, theirs)


# ------------------------------------------------------------------------------------------------- a way round the cut


class Keeps(nn.Module):
    """Leaves what it computes on another module."""

    def __init__(self, box, what=lambda x: x):
        super().__init__()
        self.box, self.what, self.linear = box, what, nn.Linear(WIDE, WIDE)

    def forward(self, x):
        x = self.linear(x)
        self.box["kept"] = self.what(x)
        return x


class Takes(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.box, self.on = box, True

    def forward(self, x):
        return x + self.box["kept"] if self.on else x


@pytest.mark.probes
@pytest.mark.inline
@pytest.mark.parametrize("probed", [True, False], ids=["in a call that probes", "in one that does not"])
@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_an_activation_that_goes_round_the_boundary_is_refused(entry, checkpoint, probed):
    box = {}
    last = Takes(box)
    pipe = Pipe(nn.Sequential(Keeps(box), nn.Tanh(), last).double(), [2, 1], CHUNKS, checkpoint=checkpoint)
    x, _ = batch()
    last.on = probed
    for _ in range(0 if probed else 2):
        pipe(x)
    last.on = True
    words = r"stage 1 \(layer 2\) gives other values, or raises, for the same input when other chunks have run"
    if not probed:
        words = "did not come through its input.*gradient would be lost"
    with pytest.raises(RuntimeError, match=f"{words}.*Return it from") as caught:
        pipe(x).sum().backward() if entry == "forward" else pipe.step(x, loss_fn=lambda output, _: output.mean())
    assert getattr(caught.value, "__notes__", []) == ([] if probed else ["stage 1 (layer 2), chunk 0, 1F0"])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_an_activation_that_stays_within_its_stage_is_fine(checkpoint):
    box, other = {}, {}
    ours = nn.Sequential(Keeps(box), nn.Tanh(), Takes(box)).double()
    theirs = nn.Sequential(Keeps(other), nn.Tanh(), Takes(other)).double()
    theirs.load_state_dict(ours.state_dict())
    x, _ = batch()
    Pipe(ours, [3], CHUNKS, checkpoint=checkpoint)(x).sum().backward()
    reference = ByChunks(theirs, x, CHUNKS)
    reference.backward(reference.output.sum())
    assert_same_grads(ours, theirs)


class Recurrent(nn.Module):
    """Adds the last hidden state, of the chunk or call before, as it is or detached."""

    def __init__(self, detach):
        super().__init__()
        self.linear, self.hidden, self.detach = nn.Linear(WIDE, WIDE), None, detach

    def forward(self, x):
        x = self.linear(x)
        if self.hidden is not None:
            x = x + self.hidden
        self.hidden = x.mean().detach() if self.detach else x.mean()
        return x


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_state_kept_from_an_earlier_chunk_or_call_is_refused(entry, chunks):
    pipe = Pipe(nn.Sequential(Recurrent(False), nn.Linear(WIDE, 2)).double(), [1, 1], chunks, checkpoint="always")
    x, y = batch()
    with pytest.raises(RuntimeError):
        for _ in range(2):
            run(entry, pipe, x, y)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_state_that_depends_on_an_earlier_chunk_of_its_own_stage_is_refused_by_name(checkpoint, schedule):
    layers = nn.Sequential(nn.Linear(WIDE, WIDE), Recurrent(False), nn.Linear(WIDE, 2)).double()
    pipe = Pipe(layers, [1, 2], CHUNKS, checkpoint=checkpoint, schedule=schedule, mixes_rows=True)
    x, y = batch()
    with pytest.raises(RuntimeError, match="stage 1 .* depends on the input of stage 1 .* did not come through"):
        run("step", pipe, x, y)


@pytest.mark.parametrize("what", ["parameter", "activation"])
@pytest.mark.parametrize("first", ["output", "kept"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("apart", [False, True], ids=["one backward", "two backwards"])
def test_an_activation_kept_on_a_module_and_used_in_the_loss_outside_is_never_lost(checkpoint, first, what, apart):
    # The auxiliary loss of a mixture of experts: `loss + layer.aux_loss`. Its gradient would end in an alias.
    found = []
    torch.manual_seed(0)
    box, layers = {}, [nn.Linear(WIDE, WIDE), None]
    kept = {"parameter": lambda x: layers[1].linear.bias.sum(), "activation": lambda x: x.sum()}
    layers[1] = Keeps(box, kept[what])
    model = nn.Sequential(*layers).double()
    x, _ = batch()
    for module in (Pipe(model, [1, 1], 1, checkpoint=checkpoint), model):
        model.zero_grad()
        try:
            output = module(x).sum()
            parts = [output, box["kept"]] if first == "output" else [box["kept"], output]
            if apart:
                parts[0].backward(retain_graph=True)
                parts[1].backward()
            else:
                (parts[0] + parts[1]).backward()
        except RuntimeError:
            assert module is not model
            return
        found.append([param.grad for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_that_takes_an_activation_past_its_arguments_is_refused():
    box = {}
    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE), Keeps(box)).double(), [1, 1], CHUNKS, checkpoint="never")
    with pytest.raises(RuntimeError, match="loss_fn computes with a tensor that depends on .*did not come through"):
        pipe.step(batch()[0], loss_fn=lambda output, _: output.mean() + box["kept"].mean())


# ------------------------------------------------------------------------------------------------------------ the rest


def test_a_stuck_lane_is_an_error_that_says_what_each_lane_waits_for():
    orders = [
        [Action(0, Kind.F, 0), Action(0, Kind.B, 0)],
        [Action(1, Kind.B, 0), Action(1, Kind.F, 0)],  # its B before its own F
        [Action(2, Kind.F, 0), Action(2, Kind.B, 0)],
    ]
    with pytest.raises(StuckError) as caught:
        merged_order(orders, needs_of(orders, stages=3))
    for words in ("lane 0 waits at 0B0 for 1B0", "lane 1 waits at 1B0 for 1F0 and 2B0", "lane 2 waits at 2F0 for 1F0"):
        assert words in str(caught.value)
    orders = [[Action(0, Kind.F, 0)], [Action(1, Kind.B, 0)]]
    with pytest.raises(StuckError, match="lane 0 is done; lane 1 waits at 1B0 for 1F0"):
        merged_order(orders, needs_of(orders, stages=2))


def test_transforms_and_forward_mode_are_refused_with_the_way_to_go():
    pipe = Pipe(small(), [2, 2], CHUNKS)
    x, _ = batch()
    params = dict(pipe.named_parameters())
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match="torch.func transforms.*create_graph=True"):
            transform(lambda given: torch.func.functional_call(pipe, given, (x,)).sum())(params)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward-mode AD cannot go through a Pipe"):
            pipe(dual)
    assert all(param is params[name] for name, param in pipe.named_parameters())


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_calls_with_a_loss_refuse_transforms_and_forward_mode_too(method):
    pipe = Pipe(small(), [2, 2], CHUNKS)
    x, _ = batch()

    def loss(given):
        return getattr(pipe, method)(given, loss_fn=lambda output, _: output.square().mean()).loss

    with pytest.raises(RuntimeError, match="torch.func transforms.*create_graph=True"):
        torch.func.grad(loss)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward-mode AD cannot go through a Pipe"):
            loss(dual)
    assert all(param.grad is None for param in pipe.parameters())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_second_backward_is_refused_in_torchs_own_words(checkpoint):
    pipe = Pipe(small(), [2, 2], CHUNKS, checkpoint=checkpoint)
    loss = pipe(batch()[0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
