"""Law 8, the edge: bad input is refused before anything runs, with the value and what to do."""

import copy
import pickle
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from partition import PartitionError
from pipeline import EagerUpdate, NoChunk, Pipe, eager_backward, reset_parameters
from pipeline.curvature import Hessian
from scheduler import Schedule, ScheduleError, by_name, verify

ROWS, WIDE = 6, 4


def net():
    return nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 2))


def mean(output, target):
    return output.mean()


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


class OwnCall(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x) + 1


class OwnOrder(nn.Sequential):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def hooked():
    model = net()
    model.register_forward_hook(lambda *_: None)
    return model


def with_parameter():
    model = net()
    model.scale = nn.Parameter(torch.ones(1))
    return model


def with_buffer():
    model = net()
    model.register_buffer("offset", torch.ones(1))
    return model


def loaded():
    model = nn.Sequential(nn.LazyLinear(2))
    model.load_state_dict(nn.Sequential(nn.Linear(3, 2)).state_dict())
    return model


MODULES = {
    "a Linear": (lambda: nn.Linear(2, 2), TypeError, r"must be an nn\.Sequential.*got Linear.*nn\.Sequential\(layer"),
    "a list": (lambda: [nn.Linear(2, 2)], TypeError, r"must be an nn\.Sequential.*got list"),
    "None": (lambda: None, TypeError, r"got NoneType"),
    "own forward": (lambda: OwnForward(nn.Tanh()), ValueError, r"OwnForward.*its own forward.*nn\.Sequential\(\*"),
    "own call": (lambda: OwnCall(nn.Tanh()), ValueError, "OwnCall.*its own __call__"),
    "own order": (lambda: OwnOrder(nn.Tanh()), ValueError, "OwnOrder.*its own __iter__"),
    "empty": (nn.Sequential, ValueError, r"no layers"),
    "hooks": (hooked, ValueError, r"hooks of its own.*Register them on the Pipe"),
    "own parameter": (with_parameter, ValueError, r"parameters or buffers of its own \(scale\).*into a layer"),
    "own buffer": (with_buffer, ValueError, r"parameters or buffers of its own \(offset\)"),
    "lazy": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)),
        ValueError,
        "lazy modules have not run yet: 1. Call the model with a batch first",
    ),
    "lazy buffer": (
        lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False)),
        ValueError,
        "lazy modules have not run yet: 0. Call the model with a batch first",
    ),
    "lazy, loaded": (loaded, ValueError, "lazy modules have not run yet: 0. Call the model with a batch first"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_cut_is_refused(name):
    build, error, words = MODULES[name]
    with pytest.raises(error, match=words):
        Pipe(build(), None, 2)


BALANCES = {
    "sum": ([2, 2], r"balance sums to 4 but the module has 3 layers \(balance: \[2, 2\]\).*Use balance=\[1, 2\]"),
    "zero": ([3, 0], r"balance\[1\] is 0, below 1"),
    "negative": ([4, -1], r"balance\[1\] is -1, below 1"),
    "float": ([1.5, 1.5], r"balance\[0\] is 1\.5, not an int; balance\[1\] is 1\.5"),
    "empty": ([], r"balance is empty"),
    "too many": ([1, 1, 1, 1], r"balance sums to 4 but the module has 3 layers"),
}


@pytest.mark.parametrize("name", BALANCES)
def test_a_balance_that_does_not_fit_is_refused(name):
    balance, words = BALANCES[name]
    with pytest.raises(PartitionError, match=words):
        Pipe(net(), balance, 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 30])
def test_a_number_of_stages_in_the_place_of_a_balance_is_told_a_balance_of_so_many(stages):
    words = rf"balance must be the layers of each stage, as a list; got {stages}\. Use balance=\[(.*)\], or"
    with pytest.raises(TypeError, match=words) as raised:
        Pipe(net(), stages, 2)
    told = [int(count) for count in re.search(words, str(raised.value))[1].split(", ")]
    assert len(told) == min(stages, 3) and Pipe(net(), told, 2).balance == told


def test_more_stages_than_devices_are_refused():
    words = r"balance has 3 stages but there are 2 devices \(cpu, cpu\).*devices=\[\.\.\.\] with 3 entries.*of 2 stages"
    with pytest.raises(ValueError, match=words):
        Pipe(net(), [1, 1, 1], devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="there are 0 devices|at least one device|no devices"):
        Pipe(net(), [3], devices=[])
    with pytest.raises(ValueError, match="device|0 stages"):
        Pipe(net(), None, devices=[])


@pytest.mark.parametrize("chunks", [0, -1])
def test_too_few_chunks_are_refused(chunks):
    with pytest.raises(ValueError, match=rf"chunks is {chunks}\..*at least 1"):
        Pipe(net(), [2, 1], chunks)
    pipe = Pipe(net(), [2, 1], 2)
    with pytest.raises(ValueError, match=rf"chunks is {chunks}\."):
        pipe.chunks = chunks
    assert pipe.chunks == 2


@pytest.mark.parametrize("chunks", [2.0, "2", None, True, [2], torch.ones(2)])
def test_chunks_that_are_no_whole_number_are_refused(chunks):
    with pytest.raises(TypeError, match=r"chunks is .*whole number"):
        Pipe(net(), [2, 1], chunks)


@pytest.mark.parametrize("policy", ["alway", "", None, 2, True, ["always"]])
def test_an_unknown_checkpoint_is_refused(policy):
    words = r"checkpoint is .*'always', 'except_last', 'never', or a callable \(stage, chunk\) -> bool"
    with pytest.raises(ValueError, match=words):
        Pipe(net(), [2, 1], 2, checkpoint=policy)
    pipe = Pipe(net(), [2, 1], 2)
    with pytest.raises(ValueError, match=words):
        pipe.checkpoint = policy
    assert pipe.checkpoint == "except_last"


@pytest.mark.parametrize("answer", [None, 1, "yes", torch.tensor(True)])
def test_a_checkpoint_callable_that_answers_something_else_is_refused(answer):
    pipe = Pipe(net(), [2, 1], 2, checkpoint=lambda stage, chunk: answer)
    with pytest.raises(ValueError, match=r"checkpoint returned .* for stage 0, chunk 0\. Return True or False"):
        pipe(torch.randn(ROWS, WIDE))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match=r"1f2b.*1f1b"):
        Pipe(net(), [2, 1], 2, schedule="1f2b")
    for schedule in (None, 3):
        with pytest.raises((TypeError, ValueError), match="schedule|None|3"):
            Pipe(net(), [2, 1], 2, schedule=schedule)


def test_a_schedule_of_other_stages_or_chunks_is_refused():
    with pytest.raises(ScheduleError, match="schedule gpipe has 3 stages but the balance has 2. Make it for 2"):
        Pipe(net(), [2, 1], 2, schedule=by_name("gpipe", 3, 2))
    pipe = Pipe(net(), [2, 1], 6, schedule=by_name("gpipe", 2, 4))
    words = r"made for 4 chunks but this mini-batch gives 5 \(chunks=6\). Give a schedule by name.*or set pipe.chunks"
    for call in (
        lambda: pipe(torch.randn(5, WIDE)),
        lambda: pipe.step(torch.randn(5, WIDE), loss_fn=mean),
        lambda: pipe.evaluate(torch.randn(5, WIDE), loss_fn=mean),
    ):
        with pytest.raises(ScheduleError, match=words):
            call()
    assert pipe(torch.randn(4, WIDE)).shape == (4, 2)


def test_a_schedule_whose_forwards_do_not_ascend_is_refused():
    """Right for `verify`, but BatchNorm's running statistics, and the order of the outputs, would be others."""
    text = "schedule mine, chunks 2, stages on lanes 0 1\nlane 0: 0F1 0F0 0B0 0B1\nlane 1: 1F1 1F0 1B0 1B1"
    schedule = Schedule.parse(text)
    verify(schedule)
    with pytest.raises(ScheduleError, match="schedule mine runs 0F0 after 0F1. In a Pipe the forwards of a"):
        Pipe(net(), [2, 1], 2, schedule=schedule)


class First(nn.Module):
    def forward(self, value):
        while not isinstance(value, torch.Tensor):
            value = next(iter(value.values())) if isinstance(value, dict) else value[0]
        return value


class Thing:
    def __repr__(self):
        return "a thing"


INPUTS = {
    "other lengths": (
        lambda x: (x, torch.randn(5, 2)),
        ValueError,
        r"different length.*Tensor\[6, 4\].*Tensor\[5, 2\].*rows: \[5, 6\].*NoChunk",
    ),
    "nothing to cut": (lambda x: (NoChunk(x), 3), ValueError, r"nothing to cut.*Tensor\[6, 4\].*at least one tensor"),
    "no tensor": (lambda x: {"a": 1, "b": None}, ValueError, r"nothing to cut.*'a': 1"),
    "empty tuple": (lambda x: (), ValueError, r"nothing to cut"),
    "0-d": (lambda x: torch.tensor(1.0), ValueError, r"0-d tensor.*NoChunk\(tensor\)"),
    "0-d beside": (lambda x: (x, torch.tensor(1.0)), ValueError, r"0-d tensor.*NoChunk\(tensor\)"),
    "no rows": (lambda x: x[:0], ValueError, r"0 rows.*at least one row"),
    "numpy": (lambda x: (x, np.ones(3)), TypeError, r"numpy\.ndarray.*torch\.from_numpy"),
    "numpy alone": (lambda x: x.numpy(), TypeError, r"(?s)numpy\.ndarray.*torch\.from_numpy"),
    "numpy number": (lambda x: (x, np.float64(1.0)), TypeError, r"numpy\.float64"),
    "object": (lambda x: [x, Thing()], TypeError, r"Thing \(a thing\).*register_pytree_node"),
    "bytes": (lambda x: (x, b"abc"), TypeError, r"builtins\.bytes"),
    "both bare and whole": (lambda x: (x, NoChunk(x)), ValueError, r"both bare and in NoChunk"),
    "NoChunk in NoChunk": (lambda x: (x, NoChunk(NoChunk(x[0]))), (TypeError, ValueError), r"NoChunk"),
    "object in NoChunk": (lambda x: (x, NoChunk(Thing())), TypeError, r"Thing"),
}


@pytest.mark.parametrize("entry", ["forward", "step", "evaluate"])
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_cannot_be_cut_is_refused(name, entry):
    build, error, words = INPUTS[name]
    pipe = Pipe(nn.Sequential(First(), *net()), [2, 2], 2)
    value = build(torch.randn(ROWS, WIDE))
    generator = torch.default_generator.get_state()
    with pytest.raises(error, match=words) as caught:
        if entry == "forward":
            pipe(value)
        elif entry == "step":
            pipe.step(value, loss_fn=mean)
        else:
            pipe.evaluate(value, loss_fn=mean)
    assert "the input" in str(caught.value) or " x " in f" {caught.value} "
    assert torch.equal(torch.default_generator.get_state(), generator)  # refused before anything was drawn


class Gives(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.calls = make, 0

    def forward(self, x):
        self.calls += 1
        return self.make(x, self.calls)


OUTPUTS = {
    "0-d": (lambda x, n: x.mean(), r"without dimensions.*mean or their sum.*pipe\.step"),
    "0-d in a tuple": (lambda x, n: (x, x.mean()), r"without dimensions"),
    "constant rows": (lambda x, n: x[:1], r"chunks of \[3, [24]\] rows gave shapes \[\[1, 2\], \[1, 2\]\].*chunks=1"),
    "a weight": (lambda x, n: (x, torch.ones(2, 2)), r"cannot be joined along dim 0"),
    "other plain values": (lambda x, n: (x, n), r"chunk 0 gave .*1\) and chunk 1 gave .*2\).*plain values.*chunks=1"),
    "other structure": (lambda x, n: (x,) if n == 1 else [x], r"cannot be joined.*same structure"),
    "other keys": (lambda x, n: {str(n): x}, r"cannot be joined.*'1'.*'2'"),
    "None once": (lambda x, n: (x, None if n == 1 else x), r"cannot be joined"),
    "True and 1": (lambda x, n: (x, True if n == 1 else 1), r"cannot be joined"),
    "sometimes the same tensor twice": (
        lambda x, n: (x, x if n == 1 else x * 2), r"cannot be joined|have run before it",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("entry", ["forward", "no_grad", "evaluate"])
def test_outputs_that_cannot_be_joined_are_refused(name, entry):
    make, words = OUTPUTS[name]
    pipe = Pipe(nn.Sequential(*net(), Gives(make)), [2, 2], 2, checkpoint="never")
    x = torch.randn(5, WIDE)
    with pytest.raises((ValueError, RuntimeError), match=words):
        if entry == "forward":
            pipe(x)
        elif entry == "no_grad":
            with torch.no_grad():
                pipe(x)
        else:
            pipe.evaluate(x, loss_fn=lambda output, _: torch.zeros(()))


@pytest.mark.probes
@pytest.mark.parametrize("make", [lambda x, n: [row.expand(3, -1) for row in x], lambda x, n: (x, len(x))])
def test_an_output_whose_structure_counts_rows_is_refused_where_chunks_have_as_many(make):
    pipe = Pipe(nn.Sequential(*net(), Gives(make)), [2, 2], 2, mixes_rows=True)
    with pytest.raises(ValueError, match="chunks of 3 and 4 rows cannot be joined: .* list with an entry for each row"):
        pipe(torch.randn(6, WIDE))


def test_a_sparse_output_is_right_without_a_gradient_and_refused_with_one():
    model = nn.Sequential(*net(), Gives(lambda x, n: x.relu().to_sparse()))
    pipe, x = Pipe(model, [2, 2], 2), torch.randn(ROWS, WIDE)
    loss_fn = lambda out, _: out.to_dense().square().mean()  # noqa: E731
    dense = model(x).to_dense().detach()
    with torch.no_grad():
        assert torch.allclose(pipe(x).to_dense(), dense)
    assert torch.allclose(pipe.evaluate(x, loss_fn=loss_fn).loss, dense.square().mean())
    H = Hessian(pipe, (x, x), loss_fn)
    for call in (lambda: pipe(x), lambda: pipe.step(x, loss_fn=loss_fn), lambda: H.trace(samples=1)):
        with pytest.raises(TypeError, match=r"output of layout torch.sparse_coo .* Return x\.to_dense\(\)"):
            call()


LEAVES = [(np.ones(2), r"numpy\.ndarray.*torch\.from_numpy"), (Thing(), r"Thing \(a thing\)")]


@pytest.mark.parametrize("leaf,words", LEAVES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_leaf_that_cannot_cross_stages_is_named_with_its_stage(leaf, words, place):
    layers = list(net())
    layers.insert(place + 1, Gives(lambda x, n: (x, leaf)))
    balance = [2, 2] if place == 0 else [3, 1]
    last = balance[0] - 1
    with pytest.raises(TypeError, match=rf"the output of stage 0 \(layers 0\.\.{last}\) holds a .*{words}") as caught:
        Pipe(nn.Sequential(*layers), balance, 2)(torch.randn(ROWS, WIDE))
    assert caught.value.__notes__ == [f"stage 0 (layers 0..{last}), chunk 0, 0F0"]


STAYING = {
    "MaskedTensor": (lambda x: masked_tensor(x.detach(), x > 0), r"x\.get_data\(\)"),
    "quantized tensor": (lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8), r"x\.dequantize\(\)"),
    "tensor on the meta device": (lambda x: x.detach().to("meta"), "give one that has"),
    "FakeTensor": (lambda x: FakeTensorMode().from_tensor(x.detach()), "leave the FakeTensorMode"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", STAYING)
def test_tensors_that_cross_no_stage_are_refused_by_name(kind):
    make, words = STAYING[kind]
    x = torch.randn(ROWS, WIDE)
    made = nn.Sequential(Gives(lambda x, n: make(x)), nn.Identity())
    for module, given, where in ((made, x, "the output of stage 0"), (net(), make(x), "the input")):
        with pytest.raises(TypeError, match=f"{where} .*holds a {kind}.*crosses no stage.* {words}"):
            Pipe(module, [1, len(module) - 1], 2)(given)


def test_a_module_without_numbers_is_refused():
    with FakeTensorMode():
        module = net()
    with pytest.raises(ValueError, match=r"parameters without numbers: \['0.weight', .*FakeTensorMode"):
        Pipe(module, [2, 1], 2)


TARGETS = {
    "other rows": (torch.randn(5, 2), ValueError, r"the target has 5 rows but the input has 6.*NoChunk"),
    "0-d": (torch.tensor(1.0), ValueError, r"the target holds a 0-d tensor"),
    "numpy": (np.ones(ROWS), TypeError, r"the target holds a numpy\.ndarray"),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_target_that_does_not_fit_is_refused(name, entry):
    target, error, words = TARGETS[name]
    pipe = Pipe(net(), [2, 1], 2)
    with pytest.raises(error, match=words):
        getattr(pipe, entry)(torch.randn(ROWS, WIDE), target, loss_fn=mean)


def sgd(pipe):
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


STEPS = {
    "grads": (lambda pipe: {"grads": "stores"}, r"grads is 'stores'\. Use 'param' or 'store'"),
    "store and optimizer": (lambda pipe: {"grads": "store", "optimizer": sgd(pipe)}, r"store\.apply\(optimizer\)"),
    "lbfgs": (lambda pipe: {"optimizer": torch.optim.LBFGS(pipe.parameters())}, r"LBFGS.*closure around pipe\.step"),
    "clip alone": (lambda pipe: {"clip_grad_norm": 1.0}, r"clip_grad_norm without an optimizer.*grads='store'"),
    "clip and scaler": (
        lambda pipe: {"clip_grad_norm": 1.0, "scaler": torch.amp.GradScaler("cpu"), "grads": "store"},
        r"clip_grad_norm with a scaler needs the optimizer",
    ),
    "reduction": (lambda pipe: {"loss_reduction": "avg"}, r"loss_reduction is 'avg'\. Use 'mean' or 'sum'"),
    "other reduction": (
        lambda pipe: {"loss_fn": nn.MSELoss(), "loss_reduction": "sum"},
        r"loss_reduction is 'sum' but MSELoss has reduction='mean'",
    ),
    "no reduction": (lambda pipe: {"loss_fn": nn.MSELoss(reduction="none")}, r"reduction='none'\. Use 'mean' or"),
}


@pytest.mark.parametrize("name", STEPS)
def test_arguments_of_step_that_exclude_each_other_are_refused(name):
    pipe = Pipe(net(), [2, 1], 2)
    build, words = STEPS[name]
    x = torch.randn(ROWS, WIDE)
    with pytest.raises(ValueError, match=words):
        pipe.step(x, torch.randn(ROWS, 2), **{"loss_fn": mean, **build(pipe)})
    assert all(param.grad is None for param in pipe.parameters())


def test_a_loss_fn_that_is_none_or_gives_no_number_is_refused():
    pipe = Pipe(net(), [2, 1], 2)
    x = torch.randn(ROWS, WIDE)
    with pytest.raises(TypeError, match="loss_fn is 3, which is not callable"):
        pipe.step(x, loss_fn=3)
    with pytest.raises(TypeError, match=r"returned 1\.0 as a loss.*floating-point tensor"):
        pipe.step(x, loss_fn=lambda output, _: 1.0)
    with pytest.raises(ValueError, match=r"a loss of shape \[3, 2\]\. Return one number"):
        pipe.step(x, loss_fn=lambda output, _: output)
    with pytest.raises(ValueError, match=r"a tuple of 3\. Return a loss, or \(sum, count\)"):
        pipe.step(x, loss_fn=lambda output, _: (output.sum(), 1, 2))
    assert all(param.grad is None for param in pipe.parameters())


@pytest.mark.parametrize("name", ["backward", "item", "detach", "losses", "__deepcopy__"])
def test_what_a_step_does_not_have_is_told_as_of_a_loss_where_a_loss_has_it(name):
    step = Pipe(net(), [3], 2).step(torch.randn(ROWS, WIDE), None, loss_fn=mean)
    with pytest.raises(AttributeError, match=f"Step has no attribute '{name}'") as caught:
        getattr(step, name)
    assert ("step.loss; a step has run its backward" in str(caught.value)) is hasattr(torch.Tensor, name)
    assert copy.deepcopy(step).loss == pickle.loads(pickle.dumps(step)).loss == step.loss


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(off):
    pipe = Pipe(net(), [2, 1], 2)
    with off(), pytest.raises(RuntimeError, match=r"switched off \(no_grad\)\. Use pipe\.evaluate"):
        pipe.step(torch.randn(ROWS, WIDE), loss_fn=mean)


def test_a_step_in_which_nothing_requires_a_gradient_is_refused():
    pipe = Pipe(net().requires_grad_(False), [2, 1], 2)
    with pytest.raises(RuntimeError, match="does not depend on anything that requires grad.*pipe.evaluate"):
        pipe.step(torch.randn(ROWS, WIDE), loss_fn=mean)


class Running(nn.Module):
    def __init__(self, buffer, writes=""):
        super().__init__()
        self.register_buffer("mean", buffer)
        self.weight, self.writes = nn.Parameter(torch.ones(2)), writes

    def forward(self, x):
        if self.writes == "in place":
            self.mean += 1
        elif self.writes == "unseen":
            self.mean.data.add_(1)
        return (x + self.mean) * self.weight


ENTRIES = {
    "step": lambda pipe, x: pipe.step(x, loss_fn=mean),
    "forward": lambda pipe, x: pipe(x).sum().backward(),
    "no_grad": lambda pipe, x: torch.no_grad()(pipe)(x),
    "evaluate": lambda pipe, x: pipe.evaluate(x, loss_fn=mean),
    "create_graph": lambda pipe, x: torch.autograd.grad(pipe(x).sum(), list(pipe.parameters()), create_graph=True),
    "curvature": lambda pipe, x: Hessian(pipe, (x, None), mean).trace(samples=1),
}


@pytest.mark.parametrize("of_modules", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_buffer_that_two_stages_share_may_be_read_and_not_written(entry, checkpoint, chunks, of_modules):
    for writes in ("", "in place", "unseen"):
        buffer = torch.zeros(2)
        first = Running(buffer, writes)
        model = nn.Sequential(first, nn.Tanh(), first if of_modules else Running(buffer, writes))
        pipe = Pipe(model, [2, 1], chunks, checkpoint=checkpoint)
        for _ in range(3):
            words = "is shared with stage|gave other values|what another stage, or an earlier chunk, left"
            context = pytest.raises(RuntimeError, match=words) if writes else nullcontext()
            with context:
                ENTRIES[entry](pipe, torch.ones(4, 2))
        assert not buffer.any()
        assert Pipe(model, [3], chunks)(torch.ones(4, 2)).shape == (4, 2)


def test_running_statistics_that_two_stages_share_are_refused_when_the_pipe_is_built():
    norm = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"buffer '2\.running_mean' is shared by stages 0 and 1.*one stage"):
        Pipe(nn.Sequential(norm, nn.Tanh(), norm), [2, 1], 2, deferred_batch_norm=True)


class Engine(nn.Linear):
    """A layer of the user's whose attributes are called as a Pipe's."""

    runtime = SimpleNamespace(topology="a name of its own")


def test_only_a_pipe_over_ranks_is_refused_within_another() -> None:
    layer = Engine(2, 2)
    assert Pipe(nn.Sequential(layer), [1])(torch.ones(1, 2)).shape == (1, 2)
    inner = Pipe(nn.Sequential(nn.Linear(2, 2)), [1])
    assert Pipe(nn.Sequential(inner), [1])(torch.ones(1, 2)).shape == (1, 2)
    over_ranks = SimpleNamespace(topology=SimpleNamespace())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipe, "runtime", over_ranks)
        with pytest.raises(ValueError, match=r"layer 0 is, or holds, a Pipe that runs over ranks.*devices=\[\.\.\.\]"):
            Pipe(nn.Sequential(inner), [1])


def test_a_pipe_with_a_forward_of_its_own_is_refused_as_its_steps_would_not_run_it():
    with pytest.raises(TypeError, match=r"Doubled has a forward of its own.*a layer, or a module around the Pipe"):
        type("Doubled", (Pipe,), {"forward": lambda pipe, x: 2 * Pipe.forward(pipe, x)})
    assert type("Named", (Pipe,), {"name": "a"})(net(), [len(net())])(torch.randn(4, WIDE)).size(0) == 4


REGISTERED = {
    "forward": lambda pipe: pipe.register_forward_hook(lambda module, given, output: 2 * output),
    "before": lambda pipe: pipe.register_forward_pre_hook(lambda module, given: given),
    "backward": lambda pipe: pipe.register_full_backward_hook(lambda *_: None),
    "before backward": lambda pipe: pipe.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_hooks_of_a_pipe_run_where_it_has_an_output_and_are_refused_elsewhere(kind):
    pipe, x = Pipe(net(), [1] * len(net()), 2), torch.randn(4, WIDE)
    plain = pipe(x)
    handle = REGISTERED[kind](pipe)
    assert torch.equal(pipe(x), 2 * plain if kind == "forward" else plain)
    for call in (
        lambda: pipe.step(x, loss_fn=lambda out, _: out.sum()),
        lambda: pipe.evaluate(x, loss_fn=lambda out, _: out.sum()),
        lambda: Hessian(pipe, (x, x), lambda out, _: out.sum()),
    ):
        with pytest.raises(ValueError, match=r"hooks of its own.*not run in (pipe|a product).*on a layer, or call"):
            call()
    handle.remove()
    pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")


NAMED = {
    "report": (lambda pipe, value: pipe.report(value), r"Give what pipe\.step\(\.\.\., trace=True\) returned"),
    "sampling": (lambda pipe, value: pipe.report([], None, value), r"Give partition\.devices\(\)\.sampling"),
    "state_dict": (lambda pipe, value: pipe.load_state_dict(value), "as full_state_dict\\(\\) returns it"),
    "optimizer": (
        lambda pipe, value: pipe.load_optimizer_state_dict(torch.optim.SGD(pipe.parameters()), value),
        "as full_optimizer_state_dict\\(\\) returns it",
    ),
    "dot": (lambda pipe, value: pipe.dot(value, value), r"Give a list with one for each of pipe\.parameters\(\)"),
    "replicas": (lambda pipe, value: Pipe(net(), [2, 1], replicas=value, devices=["cpu"] * 2), "replicas is 3"),
    "loss": (
        lambda pipe, value: eager_backward(value, EagerUpdate(torch.optim.SGD(pipe.parameters()))),
        r"Give the tensor that loss\.backward\(\)",
    ),
    "layer": (lambda pipe, value: reset_parameters(value), "Give the module that is to be initialised"),
    "training": (lambda pipe, value: Hessian(pipe, DATA, mean, training=value), "training is 3. Use True or False"),
    "verify": (lambda pipe, value: Hessian(pipe, DATA, mean, verify=value), "verify is 3. Use True or False"),
    "params": (lambda pipe, value: Hessian(pipe, DATA, mean, params=value), "params is 3. Give names of layers"),
    "vector": (lambda pipe, value: Hessian(pipe, DATA, mean).solve(value, damping=1.0), "b is 3. Give a vector"),
}  # fmt: skip
DATA = torch.ones(ROWS, WIDE), None


@pytest.mark.parametrize("name", NAMED)
def test_a_number_in_the_place_of_an_object_is_refused_with_what_to_give(name):
    call, words = NAMED[name]
    with pytest.raises(TypeError, match=words):
        call(Pipe(net(), [2, 1], 2, devices=["cpu"] * 2), 3)


def test_a_module_does_not_choose_parameters():
    pipe = Pipe(net(), [2, 1], 2, devices=["cpu"] * 2)
    with pytest.raises(TypeError, match="params is Linear.*Give names of layers or parameters, or a function"):
        Hessian(pipe, DATA, mean, params=pipe[0])


def test_so_many_chunks_that_no_schedule_could_list_them_are_refused_at_once():
    with pytest.raises(ValueError, match="lanes is . and chunks 1000000000, .* at most 262144. Use fewer chunks"):
        Pipe(net(), [2, 1], 10**9, devices=["cpu"] * 2)
