"""Law 4: random numbers belong to (seed of the call, chunk, layer), and every generator is left as it was found."""

import copy
from itertools import combinations, product
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe, is_recomputing, layer_seed
from pipeline.recompute.randomness import _QUIET, draw_seed, quiet_layers

ENTRIES = ("forward", "step")
ROWS, WIDTH = 7, 6


class Mask(nn.Module):
    """Dropout in eval mode too, so that all entry points draw the same."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=True)


def masked() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH), Mask(), nn.Linear(WIDTH, WIDTH), Mask(), nn.Tanh(), Mask()]
    return nn.Sequential(*layers).double()


def batch() -> Tensor:
    torch.manual_seed(6)
    return torch.randn(ROWS, WIDTH).double()


def total(out: Tensor, target: object = None) -> Tensor:
    return out.sum()


def outputs(pipe: Pipe, x: Tensor, entry: str) -> Tensor:
    """The output of a forward, a step or an evaluation at seed 9."""
    torch.manual_seed(9)
    if entry == "forward":
        return pipe(x).detach()
    if entry == "no_grad":
        with torch.no_grad():
            return pipe(x)
    make = pipe.step if entry == "step" else pipe.evaluate
    return make(x, loss_fn=total, loss_reduction="sum", outputs=True).outputs


def by_hand(model: nn.Sequential, x: Tensor, chunks: int) -> Tensor:
    """The plain module, seeded by the public rule."""
    torch.manual_seed(9)
    seed = draw_seed()
    found = []
    for chunk, value in enumerate(x.tensor_split(min(chunks, len(x)))):
        for layer, module in enumerate(model):
            torch.manual_seed(layer_seed(seed, chunk, layer))
            value = module(value)
        found.append(value.detach())
    return torch.cat(found)


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("balance", [[6], [2, 4], [1, 2, 3], [1, 1, 1, 1, 1, 1]])
def test_masks_are_the_same_for_every_entry_point_schedule_and_checkpoint_mode_and_those_of_the_public_rule(
    chunks: int, balance: list[int]
) -> None:
    model, x = masked(), batch()
    expected = by_hand(model, x, chunks)
    assert 0 < (expected == 0).double().mean() < 1
    for schedule, policy in product(["gpipe", "1f1b"], ["always", "except_last", "never"]):
        pipe = Pipe(model, balance, chunks, schedule=schedule, checkpoint=policy)
        for entry in ("forward", "no_grad", "step", "evaluate"):
            assert torch.equal(outputs(pipe, x, entry), expected), (schedule, policy, entry)


@pytest.mark.parametrize("entry", ENTRIES)
def test_gradients_through_masks_are_the_same_for_every_schedule_balance_and_checkpoint_mode(entry: str) -> None:
    """A recomputation that drew other masks would leave the outputs right and the gradients wrong."""
    x, found = batch(), []
    for schedule, policy, balance in product(
        ["gpipe", "1f1b"], ["always", "except_last", "never"], [[6], [2, 4], [1, 2, 3]]
    ):
        model = masked()
        pipe = Pipe(model, balance, 3, schedule=schedule, checkpoint=policy)
        torch.manual_seed(9)
        if entry == "forward":
            out = pipe(x)
            torch.manual_seed(77)  # what is drawn in between has no say
            torch.rand(5)
            out.sum().backward()
        else:
            pipe.step(x, loss_fn=total, loss_reduction="sum")
        found.append([param.grad for param in model.parameters()])
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


def test_masks_differ_between_chunks_layers_and_calls_and_repeat_under_manual_seed() -> None:
    class Draw(nn.Module):
        def forward(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return *x, torch.rand(x[0].shape[0], 4)

    pipe = Pipe(nn.Sequential(Draw(), Draw(), Draw()), [1, 2], chunks=4)
    x = (torch.zeros(4, 1),)

    def draws() -> list[Tensor]:
        return [row for drawn in pipe(x)[1:] for row in drawn]  # one for each (layer, chunk)

    torch.manual_seed(0)
    first, second = draws(), draws()
    assert len(first) == 12
    assert not any(torch.equal(one, other) for one, other in combinations([*first, *second], 2))
    torch.manual_seed(0)
    assert all(map(torch.equal, draws(), first)) and all(map(torch.equal, draws(), second))
    torch.manual_seed(1)
    assert not any(map(torch.equal, draws(), first))


def test_a_layer_that_draws_more_does_not_move_the_masks_of_others() -> None:
    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(17)
            return x

    x = torch.ones(6, 5)
    shapes = [nn.Sequential(first, Mask()) for first in (nn.Identity(), Draw(), nn.Dropout(0.0))]
    one, *more = (outputs(Pipe(model, [1, 1], 3), x, "forward") for model in shapes)
    assert all(torch.equal(one, other) for other in more)


class NoisyBackward(nn.Module):
    """Draws when the gradient passes, as private training and stochastic rounding do."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: grad + torch.randn_like(grad))
        return y


def test_numbers_drawn_in_a_backward_are_the_same_for_every_schedule_and_checkpoint_mode() -> None:
    """Randomness belongs to (seed of the call, chunk, place), not to what happened to run before."""
    x, found = batch(), []
    for entry, schedule, policy in product(ENTRIES, ["gpipe", "1f1b"], ["always", "except_last", "never"]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NoisyBackward(), nn.Linear(WIDTH, WIDTH), Mask()).double()
        pipe = Pipe(model, [2, 2], 3, schedule=schedule, checkpoint=policy)
        torch.manual_seed(9)
        if entry == "forward":
            pipe(x).sum().backward()
        else:
            pipe.step(x, loss_fn=total, loss_reduction="sum")
        found.append(model[0].weight.grad)
    assert all(torch.equal(each, found[0]) for each in found)


# ------------------------------------------------------------------------------------- generators as they were found


def after_one_draw(seed: int) -> Tensor:
    torch.manual_seed(seed)
    torch.empty((), dtype=torch.int64).random_()
    return torch.get_rng_state()


class Fails(nn.Module):
    """Draws, then raises: in F, in B, or in the recomputation."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        if self.when == "R" if is_recomputing() else self.when == "F" and self.calls == 2:
            raise KeyError(self.when)
        y = x * 1
        if self.when == "B" and y.requires_grad:
            y.register_hook(self._raise)
        return y

    def _raise(self, grad: Tensor) -> None:
        torch.rand(3)
        raise KeyError("B")


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("entry", ["forward", "no_grad", "inference", "step", "evaluate"])
@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_call_draws_one_number_and_leaves_the_generator_where_that_left_it(
    call: int, entry: str, policy: str
) -> None:
    """The first steps compare the loss with the un-pipelined one, others do not: neither may show."""
    pipe = Pipe(masked(), [2, 4], 3, checkpoint=policy)
    for _ in range(call):
        pipe.step(batch(), loss_fn=total, loss_reduction="sum")
    x = batch()
    expected = after_one_draw(31)
    torch.manual_seed(31)
    if entry == "inference":
        with torch.inference_mode():
            pipe(x)
    elif entry in ("forward", "no_grad"):
        with torch.set_grad_enabled(entry == "forward"):
            out = pipe(x)
        assert torch.equal(torch.get_rng_state(), expected)
        if entry == "forward":
            out.sum().backward(retain_graph=True)
            out.sum().backward(create_graph=True)
            assert torch.equal(torch.get_rng_state(), expected)  # backward draws nothing
            for param in pipe.parameters():
                param.grad = None  # create_graph leaves cycles through .grad
    else:
        (pipe.step if entry == "step" else pipe.evaluate)(x, loss_fn=total, loss_reduction="sum")
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("when", ["F", "R", "B"])
def test_a_failed_call_leaves_the_generator_where_the_one_draw_left_it(entry: str, when: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), Fails(when)), [1, 1], 3, checkpoint="always")
    x = torch.ones(6, 3)
    expected = after_one_draw(31)
    torch.manual_seed(31)
    with pytest.raises(KeyError, match=when):
        if entry == "forward":
            pipe(x).sum().backward()
        else:
            pipe.step(x, loss_fn=total, loss_reduction="sum")
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_loss_that_fails_leaves_the_generator_where_the_one_draw_left_it() -> None:
    def loss(out: Tensor, target: object) -> Tensor:
        torch.rand(2)
        raise KeyError("loss")

    pipe = Pipe(masked(), [2, 4], 3)
    x, expected = batch(), after_one_draw(31)
    torch.manual_seed(31)
    for make in (pipe.step, pipe.evaluate):
        torch.manual_seed(31)
        with pytest.raises(KeyError):
            make(x, loss_fn=loss)
        assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_loss_that_is_refused_leaves_the_generator_where_the_one_draw_left_it(entry: str) -> None:
    """The comparison with the un-pipelined loss runs the loss_fn once more, after the forward."""
    pipe = Pipe(masked(), [2, 4], 3)
    x, expected = batch(), after_one_draw(31)
    torch.manual_seed(31)
    with pytest.raises(ValueError, match="is not a mean over rows"):
        getattr(pipe, entry)(x, loss_fn=lambda out, target: out.sum() + 100)
    assert torch.equal(torch.get_rng_state(), expected)


def test_other_generators_of_the_user_are_not_touched() -> None:
    mine = torch.Generator().manual_seed(8)
    state = mine.get_state()
    Pipe(masked(), [2, 4], 3)(batch()).sum().backward()
    assert torch.equal(mine.get_state(), state)


def test_the_draw_does_not_depend_on_default_dtype_or_device() -> None:
    x, model = batch(), masked()
    torch.manual_seed(2)
    expected = Pipe(model, [2, 4], 3)(x)
    torch.manual_seed(2)
    with torch.device("meta"):
        torch.manual_seed(2)
        seed = draw_seed()
    torch.manual_seed(2)
    assert draw_seed() == seed and 0 <= seed < 2**63
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(2)
        assert torch.equal(Pipe(model, [2, 4], 3)(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------- private generators


class Private(nn.Module):
    """A layer with a generator of its own, which no seed of the call reaches."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        if self.fail:
            raise KeyError("private")
        return x * drawn


def private(shared: bool) -> tuple[nn.Sequential, list[torch.Generator]]:
    torch.manual_seed(5)
    one = torch.Generator().manual_seed(11)
    other = one if shared else torch.Generator().manual_seed(12)
    layers = [nn.Linear(4, 4), Private(one), nn.Linear(4, 4), Private(other), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double(), [one, other]


@pytest.mark.parametrize("shared, balance", [
    (False, [5]), (False, [2, 3]), (False, [2, 1, 2]), (True, [5]), (True, [1, 3, 1]),
])
@pytest.mark.parametrize("entry", [*ENTRIES, "create_graph"])
def test_a_private_generator_is_replayed_in_recomputations_and_left_where_the_forwards_left_it(
    shared: bool, entry: str, balance: list[int]
) -> None:
    x = torch.linspace(-1, 1, 24).reshape(6, 4).double()
    plain, generators = private(shared)
    for piece in x.tensor_split(3):
        plain(piece).sum().backward()
    expected = [param.grad for param in plain.parameters()], [each.get_state() for each in generators]
    for policy, schedule in product(["always", "except_last", "never"], ["gpipe", "1f1b"]):
        model, generators = private(shared)
        pipe = Pipe(model, balance, 3, checkpoint=policy, schedule=schedule)
        if entry == "step":
            pipe.step(x, loss_fn=total, loss_reduction="sum")
            grads = [param.grad for param in model.parameters()]
        else:
            grads = torch.autograd.grad(pipe(x).sum(), list(model.parameters()), create_graph=entry == "create_graph")
        for grad, reference in zip(grads, expected[0], strict=True):
            assert torch.allclose(grad, reference, rtol=1e-13, atol=0)
        assert all(map(torch.equal, (each.get_state() for each in generators), expected[1]))


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("entry", [*ENTRIES, "no_grad"])
def test_a_private_generator_that_two_stages_draw_from_is_refused(entry: str, workers: str) -> None:
    """Whose turn comes when depends on the schedule: looped-bfs and zb-v gave other numbers than gpipe."""
    model, generators = private(shared=True)
    states = [each.get_state() for each in generators]
    pipe = Pipe(model, [2, 3], 3, workers=workers)
    words = r"a random generator of stage 1 .* is shared with stage 0 .* give each its own"
    with pytest.raises(RuntimeError, match=words):
        outputs(pipe, torch.ones(6, 4).double(), entry)
    assert all(map(torch.equal, (each.get_state() for each in generators), states))


@pytest.mark.parametrize("entry", [*ENTRIES, "no_grad"])
def test_a_failed_call_leaves_private_generators_as_they_were(entry: str) -> None:
    model, generators = private(shared=False)
    model[3].fail = True
    pipe = Pipe(model, [2, 3], 3, checkpoint="always")
    states = [each.get_state() for each in generators]
    x = torch.ones(6, 4).double()
    with pytest.raises(KeyError):
        if entry == "step":
            pipe.step(x, loss_fn=total, loss_reduction="sum")
        else:
            with torch.set_grad_enabled(entry == "forward"):
                pipe(x)
    assert all(map(torch.equal, (each.get_state() for each in generators), states))


# --------------------------------------------------------------------------------------------------------- layer_seed

GOLDEN = {  # a published rule: changing a number changes the masks of everybody's runs
    (0, 0, 0): 0xa8e60d2e6fe23341,
    (0, 1, 2): 0x6b4303bc18c8d523,
    (0, 2, 1): 0x5dd8e48fd683cdc0,
    (1, 0, 0): 0x57367cd62c68c591,
    (-1, 3, 4): 0x38ea2fc1d81466d1,
    (2**63, 65535, 65535): 0x96b2a411c567c0c4,
    (123456789, 7, 300): 0x9d398e633975d7eb,
}


@pytest.mark.parametrize("arguments", GOLDEN)
def test_layer_seed_is_the_published_rule(arguments: tuple[int, int, int]) -> None:
    assert layer_seed(*arguments) == GOLDEN[arguments]


@pytest.mark.parametrize("kind", [numpy.uint64, numpy.int64, torch.tensor])
def test_a_layer_seed_of_whole_numbers_of_another_kind_is_that_of_pythons(kind: Any) -> None:
    for arguments in (0, 1, 2), (2**62 + 3, 500, 7), (5, 2**16 - 1, 2**16 - 1):
        assert layer_seed(*map(kind, arguments)) == layer_seed(*arguments)
        assert type(layer_seed(*map(kind, arguments))) is int


@pytest.mark.parametrize("wrong", [None, 1.5, "1", [], torch.ones(2), True])
def test_a_layer_seed_of_what_is_no_whole_number_is_refused_in_words(wrong: Any) -> None:
    for place, name in enumerate(("seed", "chunk", "layer")):
        with pytest.raises(TypeError, match=f"{name} is .* Give a whole number"):
            layer_seed(*[wrong if number == place else 0 for number in range(3)])


@given(seed=st.integers(), chunk=st.integers(0, 2**16 - 1), layer=st.integers(0, 2**16 - 1))
def test_layer_seed_is_a_seed_that_torch_takes_for_any_whole_number(seed: int, chunk: int, layer: int) -> None:
    found = layer_seed(seed, chunk, layer)
    assert isinstance(found, int) and 0 <= found < 2**64
    torch.Generator().manual_seed(found)
    assert found == layer_seed(seed, chunk, layer) == layer_seed(seed + 2**64, chunk, layer)


small = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))


@given(seed=st.integers(-(2**70), 2**70), pairs=st.lists(small, min_size=2, max_size=20, unique=True))
def test_layer_seeds_of_a_call_differ_in_their_lower_32_bits(seed: int, pairs: list[tuple[int, int]]) -> None:
    """They are all that torch's CPU generator takes of a seed."""
    assert len({layer_seed(seed, *pair) & 0xFFFFFFFF for pair in pairs}) == len(pairs)


def test_layer_seeds_of_whole_calls_differ_in_their_lower_32_bits() -> None:
    for seed in (0, 1, -5, 2**62):
        grid = [layer_seed(seed, chunk, layer) & 0xFFFFFFFF for chunk in range(64) for layer in range(128)]
        assert len(set(grid)) == len(grid)


def test_layer_seeds_of_different_calls_are_unrelated() -> None:
    """One value in common may happen by chance (birthdays in 2**32), a row of them may not."""
    rows = [tuple(layer_seed(seed, chunk, 3) & 0xFFFFFFFF for chunk in range(4)) for seed in range(200)]
    assert len(set(rows)) == 200
    assert len({value for row in rows for value in row}) >= 799


# --------------------------------------------------------------------------------------------------------- BatchNorm


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
@pytest.mark.parametrize("entry", [*ENTRIES, "create_graph", "no_grad"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_each_chunk_once(
    chunks: int, schedule: str, policy: str, entry: str, momentum: float | None
) -> None:
    torch.manual_seed(5)
    norms = [nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum)]
    model = nn.Sequential(nn.Linear(4, 4), norms[0], nn.Tanh(), norms[1]).double()
    plain = copy.deepcopy(model)
    x = torch.randn(7, 4).double()
    pipe = Pipe(model, [2, 2], chunks, schedule=schedule, checkpoint=policy)
    for call in (1, 2):
        for piece in x.tensor_split(chunks):
            plain(piece)
        if entry == "step":
            pipe.step(x, loss_fn=total, loss_reduction="sum")
        else:
            with torch.set_grad_enabled(entry != "no_grad"):
                out = pipe(x)
            if out.requires_grad:
                torch.autograd.grad(out.sum(), list(model.parameters()), create_graph=entry == "create_graph")
        assert [int(norm.num_batches_tracked) for norm in norms] == [call * chunks] * 2
        assert all(map(torch.equal, model.buffers(), plain.buffers()))


# ------------------------------------------------------------------------------------------------------- quiet layers

QUIET_LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (2, 4)), (nn.Identity(), (2, 4)), (nn.Flatten(), (2, 4, 3)),
    (nn.Unflatten(1, (2, 2)), (2, 4)), (nn.Linear(4, 3), (2, 4)),
    *[(kind(4, 4, 3), (2, 4, *[5] * dims)) for dims, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1)],
    *[
        (kind(4, 4, 3), (2, 4, *[5] * dims))
        for dims, kind in enumerate((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1)
    ],
    *[
        (kind(), (2, 4))
        for kind in (
            nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
            nn.Softsign, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.GLU,
        )
    ],
    (nn.Softmax(1), (2, 4)), (nn.LogSoftmax(1), (2, 4)),
    *[
        (kind(4), (2, 4, *[5] * dims))
        for kinds in (
            (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        )
        for dims, kind in enumerate(kinds, 1)
    ],
    (nn.LayerNorm(4), (2, 4)), (nn.RMSNorm(4), (2, 4)), (nn.GroupNorm(2, 4), (2, 4, 5)),
    (nn.LocalResponseNorm(2), (2, 4, 5)),
    *[
        (kind(2), (2, 4, *[4] * dims))
        for kinds in (
            (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
            (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
            (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        )
        for dims, kind in enumerate(kinds, 1)
    ],
    (nn.Upsample(scale_factor=2), (2, 4, 4, 4)), (nn.PixelShuffle(2), (2, 4, 4, 4)),
    (nn.PixelUnshuffle(2), (2, 4, 4, 4)), (nn.ZeroPad2d(1), (2, 4, 4, 4)),
]


def test_no_layer_that_counts_as_quiet_draws() -> None:
    """Neither forward nor backward, in neither mode."""
    seen = {nn.Embedding}
    for layer, shape in [*QUIET_LAYERS, (nn.Embedding(9, 4, max_norm=0.5), ())]:
        seen.add(type(layer))
        assert quiet_layers([(7, layer)]) == {7}, layer
        x = torch.randn(shape, requires_grad=True) if shape else torch.tensor([1, 2, 1])
        before = torch.get_rng_state()
        for training in (True, False):
            out = layer.train(training)(x)
            out.sum().backward()
        assert torch.equal(torch.get_rng_state(), before), layer
    assert seen == set(_QUIET)


class OwnWeight(torch.Tensor):
    pass


def _with_method(name: str) -> nn.Module:
    layer = nn.Conv2d(2, 2, 1)
    setattr(layer, name, getattr(layer, name))
    return layer


def _with(register: str) -> nn.Module:
    layer = nn.Linear(2, 2)
    getattr(layer, register)(lambda *_: None)
    return layer


def _with_weight(weight: torch.Tensor) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(weight)
    return layer


def _with_buffer() -> nn.Module:
    layer = nn.BatchNorm1d(2)
    layer.running_mean = layer.running_mean.as_subclass(OwnWeight)
    return layer


def _compiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer._compiled_call_impl = layer._call_impl
    return layer


@pytest.mark.parametrize("layer", [
    nn.Dropout(0.0), nn.RReLU(), nn.MultiheadAttention(2, 1), nn.LSTM(2, 2), nn.TransformerEncoderLayer(2, 1, 2),
    nn.Sequential(nn.Linear(2, 2), nn.Dropout()), type("Mine", (nn.Linear,), {})(2, 2), Mask(),
    _with_method("forward"), _with_method("_conv_forward"), _compiled(), _with_buffer(),
    _with("register_forward_hook"), _with("register_forward_pre_hook"), _with("register_full_backward_hook"),
    _with("register_full_backward_pre_hook"), nn.Sequential(nn.ReLU(), _with("register_forward_hook")),
    _with_weight(torch.randn(2, 2).as_subclass(OwnWeight)),
    nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.utils.parametrize.register_parametrization(
        nn.Linear(2, 2), "weight", nn.Identity()
    ),
], ids=lambda layer: type(layer).__name__)
def test_a_layer_into_which_anything_was_put_is_seeded(layer: nn.Module) -> None:
    assert quiet_layers([(0, nn.ReLU()), (1, layer)]) == {0}


@pytest.mark.parametrize("kind", [nn.Linear, nn.Sequential])
def test_a_class_that_was_patched_is_seeded(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = kind.forward
    layer = nn.Sequential(nn.Linear(2, 2))
    assert quiet_layers([(0, layer)]) == {0}
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * torch.rand(()))
    assert quiet_layers([(0, layer), (1, nn.ReLU())]) == {1}


@pytest.mark.parametrize("register", [
    "register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
])
def test_under_a_hook_of_all_modules_every_layer_is_seeded(register: str) -> None:
    handle = getattr(nn.modules.module, register)(lambda *_: None)
    try:
        assert quiet_layers([(0, nn.ReLU())]) == frozenset()
    finally:
        handle.remove()


@pytest.mark.parametrize("observer", ["saved tensors", "function mode", "dispatch mode"])
def test_who_draws_while_torchs_own_layers_compute_draws_the_same_under_every_schedule(observer: str) -> None:
    """Stochastic rounding of what is saved, a mode that adds noise."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoisyFunctions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            return out + torch.rand(()) if func is torch.relu or func is functional.relu else out

    class NoisyDispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            return out + torch.rand(()) if func is torch.ops.aten.relu.default else out

    def noisy(tensor: Tensor) -> Tensor:
        return tensor.detach() + torch.rand(()) if tensor.is_floating_point() else tensor

    found = []
    for schedule in ("gpipe", "1f1b"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        pipe = Pipe(model, [2, 2, 1], 3, schedule=schedule, checkpoint="never")
        contexts = {
            "saved tensors": torch.autograd.graph.saved_tensors_hooks(noisy, noisy),
            "function mode": NoisyFunctions(), "dispatch mode": NoisyDispatch(),
        }
        torch.manual_seed(9)
        x = torch.randn(6, 4)
        with contexts[observer]:
            pipe.step(x, loss_fn=total, loss_reduction="sum")
        found.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *found))
