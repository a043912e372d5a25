"""Law 5: torch's switches are at a recomputation what they were at its forward, and as found again afterwards."""

import gc
import threading
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context

import pytest
import torch
from by_chunks import CHECKPOINTS, ByChunks, assert_same_grads, call_seed, same, step_by_chunks, twins
from pipeline_probes import outside
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from pipeline import Pipe, is_recomputing
from pipeline.common.places import Place

ROWS, WIDE, CHUNKS = 7, 6, 3


def mlp():
    """Float32, with weights that autocast casts, one layer it does not, and masks."""
    return nn.Sequential(
        nn.Linear(WIDE, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 4)
    )


class Attention(nn.Module):
    """Rows of 3 tokens: what scaled_dot_product_attention gives depends on the kernels it may choose."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDE, 3 * 8)

    def forward(self, x):
        q, k, v = (each.reshape(len(x), 1, 4, 2) for each in self.inner(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).reshape(len(x), 8)


class Probe(nn.Module):
    """Notes what `read()` says at each forward, apart for forwards and recomputations."""

    def __init__(self, read):
        super().__init__()
        self.read, self.notes = read, outside(([], []))

    @property
    def forwards(self):
        return self.notes()[0]

    @property
    def recomputed(self):
        return self.notes()[1]

    def forward(self, x):
        (self.recomputed if is_recomputing() else self.forwards).append(self.read())
        return x


class Constant(nn.Module):
    """Multiplies by a number made in the default dtype, on the default device: both show in the result."""

    def forward(self, x):
        made = torch.full((), 1 / 3)
        scale = 2.0 if made.device.type == "meta" else 1.0
        return x * scale * (0.5 if made.dtype == torch.float64 else 0.25) + scale


class ScaleLinear(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3.0 if func is F.linear else out


class ScaleTanh(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


class CountAddmm(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_uncached():
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


@contextmanager
def autocast_with_a_hole():
    with autocast(), torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def everything():
    with autocast(), default_dtype(), torch.device("meta"), ScaleLinear(), ScaleTanh(), sdpa_kernel(SDPBackend.MATH):
        yield


CONTEXTS = {
    "autocast": autocast,
    "autocast uncached": autocast_uncached,
    "autocast with a hole": autocast_with_a_hole,
    "default dtype": default_dtype,
    "default device": default_device,
    "device context": lambda: torch.device("meta"),
    "torch-function mode": ScaleLinear,
    "dispatch mode": ScaleTanh,
    "sdpa kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "precision": lambda: precision("cuda", "matmul"),
    "everything": everything,
}


def ambient_model():
    return nn.Sequential(*mlp(), nn.Linear(4, WIDE), Attention(), Constant(), nn.Tanh(), nn.Linear(8, 3))


def switches():
    """All that a call must leave as it was found."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.is_grad_enabled(),
        tuple(map(id, _get_current_function_mode_stack())),
        tuple(map(id, _get_current_dispatch_mode_stack())),
        precisions(),
    )


def loss_of(output):
    return output.float().pow(2).sum()


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_forward_entry_point_gives_the_plain_modules_bits_in_a_context(name, checkpoint, inside):
    ours, theirs = twins(ambient_model())
    seed = call_seed(5)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    pipe = Pipe(ours, [4, 4, 4], CHUNKS, checkpoint=checkpoint)
    before = switches()

    with CONTEXTS[name]():
        torch.manual_seed(5)
        output = pipe(x)
        reference = ByChunks(theirs, x, CHUNKS, seed)
        if inside:
            loss_of(output).backward()
            reference.backward(loss_of(reference.output))
    assert switches() == before
    if not inside:
        loss_of(output).backward()
        reference.backward(loss_of(reference.output))
        assert switches() == before
    assert same(output, reference.output)
    assert same(x.grad, reference.input_grad)
    assert_same_grads(pipe, theirs)


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_step_gives_the_plain_modules_bits_in_a_context(name, checkpoint):
    ours, theirs = twins(ambient_model())
    seed = call_seed(5)
    x, y = torch.randn(ROWS, WIDE), torch.randn(ROWS, 3)

    def loss_fn(output, target):
        return (output.float() - target).pow(2).mean()

    pipe = Pipe(ours, [4, 4, 4], CHUNKS, checkpoint=checkpoint)
    before = switches()
    with CONTEXTS[name]():
        within = switches()
        torch.manual_seed(5)
        loss = pipe.step(x, y, loss_fn=loss_fn).loss
        assert switches() == within
        with torch.random.fork_rng(devices=()):
            expected = step_by_chunks(theirs, x, y, CHUNKS, loss_fn, seed)
    assert switches() == before
    assert same(loss, expected)
    assert_same_grads(pipe, theirs)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("name", ["autocast", "torch-function mode", "default dtype"])
def test_second_order_outside_the_context_is_the_plain_modules(name, checkpoint):
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), Constant(), nn.Linear(8, 3)))
    x = torch.randn(ROWS, WIDE)
    pipe = Pipe(ours, [2, 2], CHUNKS, checkpoint=checkpoint)
    found = []
    for module in (pipe, theirs):
        with CONTEXTS[name]():
            output = module(x)
        params = list(module.parameters())
        grads = torch.autograd.grad(loss_of(output), params, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), params)])
    tolerance = {"rtol": 5e-2, "atol": 5e-1} if name == "autocast" else {"rtol": 1e-4, "atol": 1e-4}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


PROBES = {
    "autocast": (autocast, lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))),
    "autocast cache": (autocast_uncached, torch.is_autocast_cache_enabled),
    "default dtype": (default_dtype, torch.get_default_dtype),
    "default device": (default_device, torch.get_default_device),
    "device context": (lambda: torch.device("meta"), torch.get_default_device),
    "function modes": (ScaleLinear, lambda: [id(mode) for mode in _get_current_function_mode_stack()]),
    "dispatch modes": (ScaleTanh, lambda: [id(mode) for mode in _get_current_dispatch_mode_stack()]),
    "sdpa kernel": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    ),
    # Not in the list, but each chooses kernels, so it changes bits if the recomputation does not see it.
    "oneDNN off": (lambda: one_dnn_off(), torch._C._get_mkldnn_enabled),
    "deterministic": (lambda: deterministic(), torch.are_deterministic_algorithms_enabled),
    "matmul precision": (lambda: matmul_precision("high"), torch.get_float32_matmul_precision),
    "matmul precision of CPUs": (lambda: matmul_precision("medium"), lambda: precisions()),
    **{
        f"precision of {names}": (lambda names=names: precision(*names), lambda: precisions())
        for names in (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "rnn"))
    },
}


def precisions():
    read = torch._C._get_fp32_precision_getter
    backends = [("generic", ["all"]), *[(name, ["all", "matmul", "conv", "rnn"]) for name in ("cuda", "mkldnn")]]
    return [read(backend, operation) for backend, operations in backends for operation in operations]


@contextmanager
def matmul_precision(value):
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend in ("cuda", "mkldnn"):
            torch._C._set_fp32_precision_setter(backend, "matmul", "none")


@contextmanager
def precision(backend, operation):
    """One of torch's newer switches, beside which torch.get_float32_matmul_precision() may raise."""
    before = torch._C._get_fp32_precision_getter(backend, operation)
    torch._C._set_fp32_precision_setter(backend, operation, "ieee" if operation == "conv" else "tf32")
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter(backend, operation, before)


@contextmanager
def one_dnn_off():
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags also sets what warns without an Intel GPU
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("entered_at", ["forward", "backward"])
def test_a_recomputation_sees_the_switches_of_its_forward(name, entered_at):
    context, read = PROBES[name]
    probe = Probe(read)
    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE), probe), [1, 1], 2, checkpoint="always")
    outside = read()
    x = torch.randn(4, WIDE)
    if entered_at == "forward":
        with context():
            loss = loss_of(pipe(x))
        loss.backward()
        assert outside not in probe.forwards
    else:
        loss = loss_of(pipe(x))
        with context():
            inside = read()
            loss.backward()
            assert read() == inside
    assert probe.recomputed == probe.forwards and len(probe.forwards) == 2
    assert read() == outside


@pytest.mark.parametrize("name", CONTEXTS)
def test_switches_are_as_found_after_a_recomputation_that_failed(name):
    class FailsLater(nn.Module):
        def forward(self, x):
            if is_recomputing():
                raise KeyError("in the recomputation")
            return x

    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE), FailsLater()), [1, 1], 2, checkpoint="always")
    before = switches()
    x = torch.randn(4, WIDE)
    with CONTEXTS[name]():
        loss = loss_of(pipe(x))
    with pytest.raises(KeyError, match="in the recomputation"):
        loss.backward()
    assert switches() == before
    with CONTEXTS[name]():
        within = switches()
        with pytest.raises(KeyError, match="in the recomputation"):
            pipe.step(x, loss_fn=lambda output, _: loss_of(output), loss_reduction="sum")
        assert switches() == within
    assert switches() == before


def test_a_counting_mode_counts_the_recomputation_too():
    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), [1, 1], 2, checkpoint="always")
    with CountAddmm() as mode:
        loss = loss_of(pipe(torch.randn(4, WIDE)))
        assert mode.count == 4
    loss.backward()
    assert mode.count == 8


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_eval_between_forward_and_backward_changes_nothing(checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    ours, theirs = twins(model.double())
    x = torch.randn(8, WIDE, dtype=torch.float64)
    seed = call_seed(7)
    pipe = Pipe(ours, [2, 3], 4, checkpoint=checkpoint)
    output = pipe(x)
    pipe.eval()
    output.pow(2).sum().backward()
    assert not any(module.training for module in pipe.modules())
    reference = ByChunks(theirs, x, 4, seed)
    reference.backward(reference.output.pow(2).sum())
    assert_same_grads(pipe, theirs)
    for one, other in zip(pipe.buffers(), theirs.buffers(), strict=True):
        assert same(one, other)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_train_between_a_forward_in_eval_mode_and_its_backward_changes_nothing(checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    ours, theirs = twins(model.double())
    x = torch.randn(8, WIDE, dtype=torch.float64)
    pipe = Pipe(ours, [2, 2], 4, checkpoint=checkpoint).eval()
    output = pipe(x)
    pipe.train()
    output.pow(2).sum().backward()
    assert all(module.training for module in pipe.modules())
    reference = ByChunks(theirs.eval(), x, 4)
    reference.backward(reference.output.pow(2).sum())
    assert_same_grads(pipe, theirs)
    assert int(ours[1].num_batches_tracked) == 0


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_one_layer_in_eval_mode_stays_in_it(checkpoint):
    model = nn.Sequential(nn.Linear(WIDE, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    ours, theirs = twins(model.double())
    for model in (ours, theirs):
        model[1].eval()  # fine-tuning: frozen statistics in a model that trains
    x = torch.randn(8, WIDE, dtype=torch.float64)
    pipe = Pipe(ours, [2, 2], 2, checkpoint=checkpoint)
    pipe(x).pow(2).sum().backward()
    reference = ByChunks(theirs, x, 2)
    reference.backward(reference.output.pow(2).sum())
    assert_same_grads(pipe, theirs)
    assert [int(ours[index].num_batches_tracked) for index in (1, 3)] == [0, 2]
    pipe.evaluate(x, loss_fn=lambda output, _: output.mean())
    assert [layer.training for layer in pipe] == [True, False, True, True] and pipe.training


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_backward_in_another_thread_gives_the_same_bits(checkpoint):
    # Switches are kept per thread; the one that calls backward() has none of those of the forward.
    ours, theirs = twins(mlp())
    x = torch.randn(ROWS, WIDE)
    seed = call_seed(3)
    pipe = Pipe(ours, [4, 3], CHUNKS, checkpoint=checkpoint)
    with everything():
        loss = loss_of(pipe(x))
        reference = ByChunks(theirs, x, CHUNKS, seed)
        theirs_loss = loss_of(reference.output)
    reference.backward(theirs_loss)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same_grads(pipe, theirs)


SETTING = ContextVar("setting", default=0)


@pytest.mark.parametrize("in_an_empty_one", [False, True])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("workers", ["inline", "threads"])
def test_a_recomputation_finds_the_context_variables_of_its_forward(workers, order, in_an_empty_one):
    probes = [Probe(SETTING.get), Probe(SETTING.get)]
    model = nn.Sequential(nn.Linear(WIDE, WIDE), probes[0], nn.Linear(WIDE, WIDE), probes[1])
    places = [Place(torch.device("cpu"), name) for name in "ab"]
    pipe = Pipe(model, [2, 2], 2, checkpoint="always", workers=workers, devices=places)
    x = torch.randn(4, WIDE)
    for call in (1, 2, 3):
        before = SETTING.set(call)
        loss = loss_of(pipe(x))
        SETTING.reset(before)
        context = Context() if in_an_empty_one else copy_context()
        context.run(torch.autograd.grad, loss, list(pipe.parameters()), create_graph=order == 2)
        assert SETTING.get() == 0
        assert [probe.recomputed[-2:] for probe in probes] == [[call] * 2] * 2


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_saved_tensor_hooks_of_the_caller_act_or_are_refused_by_name(checkpoint):
    # Activation compression: the hooks change what is saved, so the plain module's gradients show them.
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    x = torch.randn(ROWS, WIDE, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.round(decimals=1), lambda tensor: tensor):
        try:
            output = Pipe(ours, [2, 1], CHUNKS, checkpoint=checkpoint)(x)
            output.sum().backward()
        except RuntimeError as error:
            assert "saved" in str(error)
            return
        reference = ByChunks(theirs, x, CHUNKS)
        reference.backward(reference.output.sum())
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_saved_tensor_hooks_around_the_forward_alone_act_or_are_refused_by_name(checkpoint):
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    x = torch.randn(ROWS, WIDE, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.round(decimals=1), lambda tensor: tensor):
        try:
            output = Pipe(ours, [2, 1], CHUNKS, checkpoint=checkpoint)(x)
        except RuntimeError as error:
            assert "saved" in str(error)
            return
        reference = ByChunks(theirs, x, CHUNKS)
    output.sum().backward()
    reference.backward(reference.output.sum())
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_calls_in_one_autocast_region_do_not_pile_up_cast_weights(entry):
    # autocast keeps the cast of every leaf that requires grad until the region ends; aliases are new leaves each call.
    pipe = Pipe(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), [1, 1], 2, checkpoint="always")
    x = torch.randn(4, 64)
    alive = []
    gc.collect()
    with autocast():
        for _ in range(4):
            if entry == "step":
                pipe.step(x, loss_fn=lambda output, _: output.float().mean())
            else:
                loss_of(pipe(x)).backward()
            gc.collect()
            alive.append(sum(1 for each in gc.get_objects() if type(each) is nn.Parameter))
    assert alive[-1] == alive[0], f"parameters alive after each call: {alive}"


class ScaleSums(TorchFunctionMode):
    """Changes functions that a Pipe needs for itself, to join chunks and to add their losses and gradients."""

    changed = (torch.add, torch.cat, torch.Tensor.add, torch.Tensor.__add__)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2.0 if func in self.changed else out


def test_a_function_mode_acts_on_the_layers_and_not_on_the_pipe():
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    x = torch.randn(ROWS, WIDE, dtype=torch.float64)
    pipe = Pipe(ours, [2, 1], CHUNKS)
    with ScaleSums():
        output = pipe(x)
        torch.testing.assert_close(output.detach(), theirs(x).detach(), rtol=1e-12, atol=1e-12)
        step = pipe.step(x, loss_fn=lambda output, _: output.pow(2).sum(), loss_reduction="sum")
        torch.testing.assert_close(step.loss, theirs(x).pow(2).sum().detach(), rtol=1e-12, atol=1e-12)


class Tripled(torch.Tensor):
    """Its matrix products are tripled by its own __torch_function__, which is off in the backward() of such a loss."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 3.0 if func is F.linear else result


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_subclass_of_tensors_acts_on_a_recomputation_as_on_its_forward(checkpoint):
    ours, theirs = twins(nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    x = torch.randn(ROWS, WIDE, dtype=torch.float64).as_subclass(Tripled)
    output = Pipe(ours, [2, 1], CHUNKS, checkpoint=checkpoint)(x)
    theirs(x).sin().sum().backward()
    output.sin().sum().backward()
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad_off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_context_still_counts(grad_off):
    model = ambient_model().eval()
    x = torch.randn(ROWS, WIDE)
    with grad_off(), everything():
        output = Pipe(model, [4, 4, 4], CHUNKS)(x)
        assert same(output, ByChunks(model, x, CHUNKS).output) and not output.requires_grad
