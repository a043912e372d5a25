"""Law 1 for what people really write: odd layers and inputs give the plain module's bits, or an error; nothing else.

    EXACT     must be right                        REFUSED   right, or an error whose words say what to do
"""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from cover import either, pairwise
from law_check import differences, observed, row_loss, target_of
from law_models import MODELS, Apply, Case, Twice, normal
from law_reference import Result, Whole, call_seed, reference, reference_step
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline import NoChunk, Pipe

ROWS = 6
Odd = tuple[nn.Sequential, Any] | tuple[nn.Sequential, Any, tuple[Tensor, ...]]
EXACT: dict[str, Callable[[], Odd]] = {}
REFUSED: dict[str, Callable[[], Odd]] = {}


def exact(build: Callable[[], Odd]) -> Callable[[], Odd]:
    EXACT[build.__name__] = build
    return build


def refused(build: Callable[[], Odd]) -> Callable[[], Odd]:
    REFUSED[build.__name__] = build
    return build


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def around(*middle: Any, last: int = 4) -> nn.Sequential:
    """Linear, the odd layers, Linear: so that gradients pass through them."""
    layers = [layer if isinstance(layer, nn.Module) else Apply(layer) for layer in middle]
    return nn.Sequential(linear(), *layers, linear(last))


def x4() -> Tensor:
    return normal(ROWS, 4)


class With(nn.Module):
    """A function of (itself, x), with buffers, modules or plain attributes of its own."""

    def __init__(self, function: Callable[[Any, Any], Any], buffers: Any = None, **own: Any) -> None:
        super().__init__()
        self.function = function
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer)
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


# --------------------------------------------------------------------------------------- pytrees, aliases and views


@exact
def one_tensor_at_several_places() -> Odd:
    return around(lambda h: (h, (h, [h, h * 2])), lambda t: t[0] * t[1][0] + t[1][1][0] * t[1][1][1]), x4()


@exact
def one_tensor_at_several_places_of_the_output() -> Odd:
    return nn.Sequential(linear(), Apply(lambda h: (h, (h, [h, h * 2])))), x4()


@exact
def views_of_one_tensor_between_stages() -> Odd:
    return around(lambda h: (h, h[:, :2], h.detach()), lambda t: t[0][:, :2] * t[1] + t[2][:, 2:], last=2), x4()


@exact
def views_of_one_tensor_as_outputs() -> Odd:
    return nn.Sequential(linear(), Apply(lambda h: (h, h[:, :2], h.T.T, h[:, None, :].expand(-1, 3, -1)))), x4()


@exact
def one_tensor_or_two_from_chunk_to_chunk() -> Odd:
    return around(lambda h: (h, h if h.mean() > 0 else h * 2), lambda t: t[0] * t[1]), x4()


@exact
def a_number_without_dimensions_between_stages() -> Odd:
    return around(lambda h: (h, h.square().mean()), lambda t: t[0] * t[1]), x4()


@exact
def the_input_holds_one_tensor_twice() -> Odd:
    x = x4()
    return nn.Sequential(Apply(lambda t: t[0] * t[1]["again"]), linear()), (x, {"again": x})


@exact
def a_tensor_for_every_chunk() -> Odd:
    def use(t: Any) -> Any:
        return torch.tanh(t[0] @ t[1]), t[1]

    return nn.Sequential(Apply(use), Apply(use), Apply(lambda t: t[0] @ t[1]), linear()), (x4(), Whole(normal(4, 4)))


@exact
def a_tensor_for_every_chunk_that_is_written() -> Odd:
    return nn.Sequential(Apply(lambda t: t[0] @ t[1].mul_(2)), linear()), (x4(), Whole(normal(4, 4)))


@refused
def a_stage_writes_one_of_two_inputs_that_share_memory() -> Odd:
    """The plain module sees the write through the view too; two clones of the input do not."""
    return around(lambda h: (h, h[:, :2]), lambda t: t[0].mul_(2)[:, :2] * t[1], last=2), x4()


@refused
def a_stage_writes_one_of_two_inputs_that_share_detached_memory() -> Odd:
    return around(lambda h: (h, h.detach()), lambda t: t[0].mul_(2) * t[1]), x4()


# ------------------------------------------------------------------------------------------------- dtypes and layouts


@exact
def numbers_of_eight_bits_cross() -> Odd:
    """In which torch adds nothing, nor compares."""
    scaled = (lambda x: (x, x.detach().to(torch.float8_e4m3fn)), lambda t: torch.tanh(t[0] * t[1].double()))
    return around(*scaled), x4()


@exact
def a_nested_tensor_within_a_stage() -> Odd:
    ragged = lambda x: torch.nested.nested_tensor([row.expand(2, 4) for row in x], layout=torch.jagged)  # noqa: E731
    padded = lambda x: x.to_padded_tensor(0.0).sum(1)  # noqa: E731
    return around(nn.Sequential(Apply(ragged), nn.Tanh(), Apply(padded))), x4()


@exact
def complex_numbers() -> Odd:
    first, last = nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(4, 2, dtype=torch.complex128)
    return nn.Sequential(first, Apply(torch.tanh), last), torch.complex(x4(), normal(ROWS, 4, seed=3))


@exact
def complex_numbers_of_half_precision_cross() -> Odd:
    """Which torch does not compare."""
    halved = lambda x: torch.complex(x, x.sin()).to(torch.complex32)  # noqa: E731
    return around(halved, lambda z: torch.view_as_real(z).double().sum(-1)), x4()


@exact
def a_gradient_with_other_strides_crosses_a_cut() -> Odd:
    """`.grad` of a leaf is copied into the leaf's layout; a sum over another layout may round otherwise."""
    return around(torch.fft.fft, lambda z: z.real), x4()


@exact
def an_lstm() -> Odd:
    """It keeps its parameters in a list too, and turns its input round: the gradients have other strides."""
    lstms = [nn.LSTM(4, 4, batch_first=True).double() for _ in range(2)]
    layers = [With(lambda self, x: self.lstm(x)[0], lstm=lstm) for lstm in lstms]
    return nn.Sequential(layers[0], linear(), layers[1], nn.Dropout(0.2)), normal(ROWS, 5, 4)


class OfCudnn(nn.GRU):
    """On the host what an RNN does for cuDNN: a forward that finds other parameters moves them into one memory."""

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            weights = [weight for weight in self._flat_weights if isinstance(weight, Tensor)]
            pieces = torch.cat([weight.flatten() for weight in weights]).split([weight.numel() for weight in weights])
            for weight, piece in zip(weights, pieces, strict=True):
                with torch.autograd._unsafe_preserve_version_counter(weight):
                    weight.set_(piece.view_as(weight))


@exact
def rnns_of_cudnn() -> Odd:
    rnns = [OfCudnn(4, 4, batch_first=True).double() for _ in range(2)]
    last = With(lambda self, x: (self.rnn.flatten_parameters(), self.rnn(x)[0])[1], rnn=rnns[1])
    return nn.Sequential(With(lambda self, x: self.rnn(x)[0], rnn=rnns[0]), linear(), last), normal(ROWS, 5, 4)


@exact
def channels_last() -> Odd:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    return model.to(memory_format=torch.channels_last), normal(ROWS, 4, 6, 6).to(memory_format=torch.channels_last)


@exact
def bfloat16() -> Odd:
    return around(nn.Tanh(), nn.Dropout(0.2)).bfloat16(), x4().bfloat16()


@exact
def a_transposed_input() -> Odd:
    return around(nn.Tanh()), normal(4, ROWS).T


@refused
def an_expanded_input_that_is_written() -> Odd:
    """Torch refuses that of the plain module, too. The reference has a clone of the input."""
    return nn.Sequential(nn.ReLU(inplace=True), linear()), normal(1, 4).expand(ROWS, 4)


# ------------------------------------------------------------------------- gradients for some chunks or some leaves


@exact
def some_chunks_need_no_gradient_at_the_end() -> Odd:
    own = linear()
    return nn.Sequential(linear(), With(lambda self, x: x.detach() if x.mean() > 0 else self.own(x), own=own)), -x4()


@exact
def some_chunks_need_no_gradient_in_the_middle() -> Odd:
    return around(With(lambda self, x: x.detach() if x.mean() > 0 else self.own(x), own=linear())), x4()


@exact
def a_layer_detaches() -> Odd:
    """The stages before it have gradients to give to nobody."""
    return around(lambda h: h.detach(), nn.Tanh()), x4()


@exact
def a_leaf_of_nobody_beside_two_parameters_with_one_gradient() -> Odd:
    """a + b: autograd hands the same tensor to both; sums that are added to in place must not share it."""
    w = normal(4, 4, seed=4).requires_grad_()
    a, b = nn.Parameter(normal(4, seed=7)), nn.Parameter(normal(4, seed=8))
    return around(With(lambda self, x: x @ w + (self.a + self.b), a=a, b=b)), x4(), (w,)


@exact
def two_leaves_of_nobody_with_one_gradient() -> Odd:
    w, v = normal(4, seed=4).requires_grad_(), normal(4, seed=5).requires_grad_()
    return around(lambda x: x + (w + v)), x4(), (w, v)


@exact
def a_leaf_of_nobody_in_bfloat16() -> Odd:
    w = normal(4, seed=4).bfloat16().requires_grad_()
    return around(lambda x: x * w).bfloat16(), x4().bfloat16(), (w,)


@exact
def a_leaf_of_nobody_that_later_chunks_reach() -> Odd:
    w = normal(4, 4, seed=4).requires_grad_()
    return around(lambda x: x @ w if x.mean() > 0 else x * 2), x4(), (w,)


@exact
def hooks_on_layers_and_activations() -> Odd:
    def hooked(x: Tensor) -> Tensor:
        h = x * 2
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 3)
        return h

    def tripled(module: nn.Module, of_input: Any, of_output: Any) -> Any:
        return tuple(grad if grad is None else grad * 3 for grad in of_input)

    model = around(nn.Tanh(), hooked)
    for layer in model:
        layer.register_full_backward_hook(tripled)
        layer.register_forward_hook(lambda module, given, out: out + 1)
        layer.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return model, x4()


@exact
def a_layer_used_by_two_stages_without_parameters_in_common() -> Odd:
    drop = nn.Dropout(0.3)
    return nn.Sequential(linear(), drop, Twice().double(), drop, linear()), x4()


# ------------------------------------------------------------------------------------------------- buffers, state


def zeros() -> Tensor:
    return torch.zeros(4, dtype=torch.float64)


@exact
def a_buffer_is_replaced() -> Odd:
    def ema(self: Any, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return torch.tanh(x - self.mean)

    return around(With(ema, {"mean": zeros()})), x4()


@exact
def a_buffer_is_first_written_by_a_later_chunk() -> Odd:
    def late(self: Any, x: Tensor) -> Tensor:
        if self.calls >= 1:
            self.mean.add_(x.detach().mean(0))
        self.calls += 1
        return torch.tanh(x - self.mean)

    return around(With(late, {"mean": zeros(), "calls": torch.zeros((), dtype=torch.long)})), x4()


def _writer(self: Any, x: Tensor) -> Tensor:
    self.mean.add_(x.detach().mean(0))
    return x


def _reader(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(x - self.mean)


@exact
def a_buffer_of_two_layers_of_one_stage() -> Odd:
    """One writes it, the other reads it: in the recomputation too it has to be one tensor."""
    mean = zeros()
    return around(nn.Sequential(With(_writer, {"mean": mean}), With(_reader, {"mean": mean}))), x4()


@refused
def a_buffer_and_a_view_of_it() -> Odd:
    mean = zeros()
    return around(nn.Sequential(With(_writer, {"mean": mean}), With(_reader, {"mean": mean[:]}))), x4()


@refused
def a_buffer_that_is_written_through_a_list() -> Odd:
    def write(self: Any, x: Tensor) -> Tensor:
        self.ways[0].add_(x.detach().mean(0))
        return _reader(self, x)

    mean = zeros()
    return around(With(write, {"mean": mean}, ways=[mean])), x4()


@refused
def a_buffer_that_requires_grad() -> Odd:
    scale = torch.ones(4, dtype=torch.float64).requires_grad_()
    return around(With(lambda self, x: torch.tanh(x * self.scale), {"scale": scale})), x4(), (scale,)


@refused
def a_python_counter() -> Odd:
    def count(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x * self.calls)

    return around(With(count, calls=0)), x4()


@refused
def pythons_random_numbers() -> Odd:
    random = Random(0)
    return around(lambda x: torch.tanh(x * random.random())), x4()


@refused
def a_generator_in_a_list() -> Odd:
    def noise(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(x * torch.rand(x.shape, generator=self.generators[0], dtype=x.dtype))

    return around(With(noise, generators=[torch.Generator().manual_seed(2)])), x4()


@exact
def a_generator_that_the_first_forward_makes() -> Odd:
    def noise(self: Any, x: Tensor) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator(device=x.device).manual_seed(2)
        return torch.tanh(x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype))

    return around(With(noise, generator=None)), x4()


@refused
def a_running_mean_that_is_no_buffer() -> Odd:
    def ema(self: Any, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return torch.tanh(x - self.mean)

    return around(With(ema, mean=zeros())), x4()


@refused
def a_batch_norm_in_a_dict() -> Odd:
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    hidden = With(lambda self, x: torch.tanh(self.hidden["norm"](x) - norm.running_mean), hidden={"norm": norm})
    return around(hidden), x4(), tuple(norm.parameters())


@refused
def a_parameter_is_written_past_its_version() -> Odd:
    def halve(self: Any, x: Tensor) -> Tensor:
        self.own.weight.data.mul_(0.5)
        return self.own(x)

    return around(With(halve, own=linear())), x4()


@refused
def the_input_is_written_in_a_later_chunk_only() -> Odd:
    def late(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mul_(2) if self.calls == 3 else x * 2

    return around(With(late, calls=0)), x4()


# ------------------------------------------------------------------------------------------------------------- the law

ENTRIES = ("forward", "step")
MODES = {
    "entry": ENTRIES, "checkpoint": ("always", "never"), "balance": ("each alone", "whole"), "chunks": (3, 1),
    "train": (True, False),
}
SETTINGS = either([tuple(row.values()) for row in pairwise(MODES)], list(product(*MODES.values())))


def _built(build: Callable[[], Odd], train: bool) -> tuple[Case, Any]:
    torch.manual_seed(11)
    model, x, *extras = build()
    for leaf in _tensors(x):
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad_(leaf._base is None)
    return Case(model.train(train), lambda rows: x, extras=extras[0] if extras else ()), x


def _tensors(x: Any) -> list[Tensor]:
    leaves = [leaf.value if isinstance(leaf, Whole) else leaf for leaf in pytree.tree_leaves(x)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _plain(build: Callable[[], Odd], entry: str, chunks: int, train: bool) -> Result:
    case, x = _built(build, train)
    if entry == "forward":
        return reference(case.model, x, chunks, call_seed(3), case.loss, case.extras)
    return reference_step(case.model, x, target_of(ROWS), chunks, call_seed(3), row_loss("mean"), extras=case.extras)


def _piped(build: Callable[[], Odd], entry: str, checkpoint: str, balance: str, chunks: int, train: bool) -> Result:
    case, x = _built(build, train)
    before = [tensor.detach().clone() for tensor in _tensors(x)]
    cuts = [1] * len(case.model) if balance == "each alone" else [len(case.model)]
    pipe = Pipe(case.model, cuts, chunks, checkpoint=checkpoint, mixes_rows=True)  # some decide by the whole chunk
    given = pytree.tree_map(lambda leaf: NoChunk(leaf.value) if isinstance(leaf, Whole) else leaf, x)
    torch.manual_seed(3)
    if entry == "forward":
        outputs = pipe(given)
        loss = case.loss(outputs)
        loss.backward()
    else:
        step = pipe.step(given, target_of(ROWS), loss_fn=row_loss("mean"), outputs=True)
        outputs, loss = step.outputs, step.loss
    assert all(torch.equal(tensor, value) for tensor, value in zip(_tensors(x), before, strict=True)), "x was written"
    return observed(case, _tensors(x), outputs, loss)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", EXACT)
def test_odd_models_and_inputs_equal_the_plain_module_bit_for_bit(name):
    wrong = []
    for entry, checkpoint, balance, chunks, train in SETTINGS:
        theirs = _plain(EXACT[name], entry, chunks, train)
        ours = _piped(EXACT[name], entry, checkpoint, balance, chunks, train)
        wrong += [(entry, checkpoint, balance, chunks, train, each) for each in differences(ours, theirs)]
    assert not wrong, wrong[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_an_error_and_never_another_number(name):
    wrong = []
    for entry, checkpoint, balance, chunks, train in SETTINGS:
        try:
            ours = _piped(REFUSED[name], entry, checkpoint, balance, chunks, train)
        except (RuntimeError, ValueError):
            continue
        theirs = _plain(REFUSED[name], entry, chunks, train)
        wrong += [(entry, checkpoint, balance, chunks, train, each) for each in differences(ours, theirs)]
    assert not wrong, wrong[0]


# ------------------------------------------------------------------------------------------ one by one, to rounding


@pytest.mark.parametrize(
    ("cuts", "checkpoint"), [([1, 1, 1, 1], "always"), ([1, 1, 1, 1], "never"), ([4], "always")], ids=str
)
def test_a_buffer_in_an_output_is_what_it_was_for_its_chunk(cuts, checkpoint):
    """BatchNorm writes its statistics without a version: a loop that runs all forwards first would differentiate with
    later values, so the reference takes each chunk there and back before the next."""
    norm = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
    give = With(lambda self, x: (self.norm(x), self.norm.running_mean), norm=norm)
    model = around(give, lambda t: torch.tanh(t[0] * t[1] + t[1]))
    plain, x = deepcopy(model), x4()
    for part in x.tensor_split(3):  # the loss is a sum over rows
        square_sum(plain(part)).backward()
    square_sum(Pipe(model, cuts, 3, checkpoint=checkpoint)(x)).backward()
    assert_near([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def assert_near(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def square_sum(out: Tensor, target: Any = None) -> Tensor:
    return out.square().sum()


def sum_and_count(out: Tensor, target: Any = None) -> tuple[Tensor, int]:
    return out.square().sum(), len(out)


@pytest.mark.parametrize("chunks", [1, 3])
def test_sum_and_count_divides_each_gradient_once_although_two_leaves_share_it(chunks):
    """The gradient of w + v is one tensor; dividing it in place for both would divide twice."""
    w, v = normal(4, seed=4).requires_grad_(), normal(4, seed=5).requires_grad_()
    model = nn.Sequential(Apply(lambda t: t[0] + t[1] + (w + v)), linear())
    x = normal(ROWS, 4).requires_grad_(), normal(ROWS, 4, seed=2).requires_grad_()
    leaves = [w, v, *x, *model.parameters()]
    theirs = torch.autograd.grad(square_sum(model(x)) / ROWS, leaves)
    Pipe(model, [1, 1], chunks).step(x, loss_fn=sum_and_count)
    assert_near([leaf.grad for leaf in leaves], list(theirs))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_input_that_is_no_leaf_hands_one_whole_gradient_on(entry, checkpoint):
    model, leaf, calls = nn.Sequential(linear(), nn.Tanh(), linear()), normal(ROWS, 4).requires_grad_(), []

    def inner() -> Tensor:
        x = leaf * 2
        x.register_hook(lambda grad: (calls.append(1), grad * 3)[1])
        return x

    pipe = Pipe(model, [1, 2], 3, checkpoint=checkpoint)
    if entry == "forward":
        square_sum(pipe(inner())).backward()
    else:
        pipe.step(inner(), loss_fn=square_sum, loss_reduction="sum")
    assert len(calls) == 1
    assert_near(leaf.grad, torch.autograd.grad(square_sum(model(inner())), leaf)[0])


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("grads", ["forward", "param", "store"])
def test_a_parameter_that_is_also_an_input_gets_both_gradients_in_one_place(grads, checkpoint):
    layer = linear()
    model = nn.Sequential(Apply(lambda t: t[0] @ t[1]), layer, nn.Tanh())
    x, pipe = x4(), Pipe(model, [1, 2], 3, checkpoint=checkpoint)
    theirs = torch.autograd.grad(square_sum(model((x, layer.weight))), layer.weight)[0]
    given = x, NoChunk(layer.weight)
    if grads == "forward":
        square_sum(pipe(given)).backward()
        assert_near(layer.weight.grad, theirs)
    else:
        step = pipe.step(given, loss_fn=square_sum, loss_reduction="sum", grads=grads)
        assert_near(layer.weight.grad if grads == "param" else step.grads.get(layer.weight), theirs)
        assert grads == "param" or layer.weight.grad is None


@pytest.mark.parametrize("use", ["tied over stages", "by name and by list", "tied, and in the loss"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_parameter_with_several_ways_in_gets_the_sum_to_rounding(entry, use):
    layer = linear()
    middle = With(lambda self, x: (x @ self.own.weight) @ self.ways[0], own=layer, ways=[layer.weight])
    model = nn.Sequential(linear(), middle) if use == "by name and by list" else nn.Sequential(layer, nn.Tanh(), layer)
    extra = layer.weight if "loss" in use else torch.zeros((), dtype=torch.float64)

    def loss_fn(out: Tensor, target: Any = None) -> Tensor:
        return out.square().sum(1).mean() + extra.square().sum()

    x, pipe = x4(), Pipe(model, [1] * len(model), 3)
    theirs = torch.autograd.grad(loss_fn(model(x)), layer.weight)[0]
    if entry == "forward":
        loss_fn(pipe(x)).backward()
    else:
        pipe.step(x, loss_fn=loss_fn)
    assert_near(layer.weight.grad, theirs)


def test_a_leaf_of_half_precision_that_the_loss_reads_is_rounded_once():
    """In calls that compare losses, and in others."""
    leaf, twin = (normal(4, seed=4).bfloat16().requires_grad_() for _ in range(2))
    x, pipe, twin.grad_dtype = x4().bfloat16(), Pipe(nn.Sequential(linear().bfloat16()), [1], ROWS), torch.float32
    for _ in range(3):
        pipe.step(x, loss_fn=lambda out, _: (out * leaf).float().sum(), loss_reduction="sum")
        for row in x.split(1):
            (pipe.to_sequential()(row).detach() * twin).float().sum().backward()
        assert torch.equal(leaf.grad, twin.grad.bfloat16())
        leaf.grad = twin.grad = None


@pytest.mark.parametrize("entry", ENTRIES)
def test_sparse_gradients_stay_sparse_and_right(entry):
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True, dtype=torch.float64), linear(), nn.Tanh())
    x, pipe = torch.arange(ROWS), Pipe(model, [1, 2], 3)
    theirs = torch.autograd.grad(square_sum(model(x)), model[0].weight)[0]
    if entry == "forward":
        square_sum(pipe(x)).backward()
    else:
        pipe.step(x, loss_fn=square_sum, loss_reduction="sum")
    assert model[0].weight.grad.is_sparse
    assert_near(model[0].weight.grad.to_dense(), theirs.to_dense())


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("made", ["inside", "outside"])
def test_inference_mode_never_writes_the_callers_tensors(chunks, made):
    """Inference tensors have no version counters, so that a write cannot be seen by them."""
    model = nn.Sequential(Apply(lambda t: t[0].mul_(2) @ t[1].mul_(2)), nn.ReLU(inplace=True), linear())
    x, w = normal(ROWS, 4), normal(4, 4, seed=2)
    with torch.inference_mode():
        if made == "inside":
            x, w = x.clone(), w.clone()
        kept = x.clone(), w.clone()
        out = Pipe(model, [1, 2], chunks)((x, NoChunk(w)))
        assert torch.equal(x, kept[0]) and torch.equal(w, kept[1])
        assert_near(out, model((kept[0].clone(), kept[1].clone())))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_an_output_that_the_caller_writes_is_not_the_input(chunks, grad):
    x = x4()
    with torch.set_grad_enabled(grad):
        out = Pipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks)(x)
    out.mul_(2)
    assert torch.equal(x, x4())


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_gradients_of_the_input_alone_leave_every_grad_none(checkpoint):
    w = normal(4, 4, seed=4).requires_grad_()
    model = around(lambda x: x @ w)
    x = x4().requires_grad_()
    pipe = Pipe(model, [1, 1, 1], 3, checkpoint=checkpoint)
    assert_near(torch.autograd.grad(square_sum(pipe(x)), x), torch.autograd.grad(square_sum(model(x)), x))
    assert all(leaf.grad is None for leaf in (x, w, *model.parameters()))


def test_a_users_reentrant_checkpoint_gives_one_whole_gradient_to_hooks_and_stores():
    case, calls = MODELS["checkpoint_reentrant"](), []
    weight = case.model[1].inner[0].weight
    weight.register_hook(lambda grad: calls.append(1))
    x = case.make_input(ROWS).requires_grad_()
    pipe = Pipe(case.model, [1] * len(case.model), 3)
    case.loss(pipe(x)).backward()
    assert len(calls) == 1
    case.model.zero_grad()
    step = pipe.step(x, loss_fn=square_sum, loss_reduction="sum", grads="store")
    assert weight.grad is None
    assert step.grads.get(weight) is not None


def test_an_output_that_does_not_grow_with_the_rows_is_refused():
    """[1, 4] from each of three even chunks looks like one row for every two; the plain module gives [1, 4]."""
    model = nn.Sequential(linear(), Apply(lambda h: h.mean(0, keepdim=True)))
    with pytest.raises(ValueError, match="rows"):
        Pipe(model, [1, 1], 3)(x4())


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_the_parameters_of_rnns_stay_where_cudnn_wants_them(checkpoint: str) -> None:
    """In one memory, where they were when the Pipe was built: in training and in evaluation."""
    rnn = OfCudnn(4, 4, batch_first=True).double()
    layer = With(lambda self, x: self.rnn(x)[0], rnn=rnn)
    pipe = Pipe(nn.Sequential(linear(), layer), [1, 1], 2, checkpoint=checkpoint)
    x, addresses = normal(ROWS, 5, 4), [weight.data_ptr() for weight in rnn.parameters()]
    names = set(vars(rnn))
    for _ in range(3):
        pipe(x).sum().backward()
        with torch.no_grad():
            pipe(x)
        assert addresses == [weight.data_ptr() for weight in rnn.parameters()] and names == set(vars(rnn))


def doubled(rnn: nn.GRU) -> nn.GRU:
    """A hook makes one of its weights of a parameter, as torch.nn.utils.weight_norm does."""
    rnn.part = nn.Parameter(rnn.weight_hh_l0.detach() / 2)
    del rnn._parameters["weight_hh_l0"]
    hook: Callable[..., None] = lambda module, _: setattr(module, "weight_hh_l0", 2 * module.part)
    hook(rnn, None)
    rnn.register_forward_pre_hook(hook)
    return rnn


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_shared_rnn_has_a_weight_that_a_hook_sets(checkpoint: str) -> None:
    """It sets it in the list of parameters, too. Two stages add to one gradient."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        rnn = doubled(nn.GRU(4, 4, batch_first=True).double())
        first, last = (With(lambda self, x: self.rnn(x)[0], rnn=rnn) for _ in range(2))
        return nn.Sequential(first, linear(), last)

    plain, model, x = made(), made(), normal(ROWS, 5, 4)
    square_sum(plain(x)).backward()
    pipe = Pipe(model, [1, 1, 1], 3, checkpoint=checkpoint)
    pipe.step(x, None, loss_fn=lambda out, _: square_sum(out), loss_reduction="sum")
    assert_near([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
