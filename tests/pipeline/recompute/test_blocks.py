"""Blocks that are checkpointed compute what they compute without it: outputs, gradients, buffers, generators.

The reference is a deepcopy of the model that nobody has touched, in float64 and compared in every bit.
"""

import copy
import gc
import inspect
import pickle
import random
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import pytest
import torch
from pipeline_probes import no_collector, outside
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from pipeline import Pipe, is_checkpointing, is_recomputing
from pipeline.common.cadence import validates
from pipeline.common.errors import CheckpointError
from pipeline.recompute.blocks import checkpoint_blocks

TINY = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}


# transformers takes two seconds to import, so only where a test needs one of its models.
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=4, n_head=2, loss_type="ForCausalLM", **TINY))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(attention_dropout=0.1, max_position_embeddings=16, **SIZES, **TINY))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(max_position_embeddings=16, **SIZES, **TINY))


LANGUAGE = [(gpt2, "GPT2Block"), (llama, "LlamaDecoderLayer"), (bert, "BertLayer")]


class Block(nn.Module):
    """Whatever a recomputation could get wrong: dropout, running statistics, spectral norm, kwargs, a pytree out."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        return x + scale * self.spectral(self.drop(torch.tanh(self.norm(self.linear(x)))))


class Flat(nn.Sequential):
    """What can be pickled of that: no parametrization."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.drop = nn.Dropout2d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.conv(x))))


def stack(count: int = 3, kind: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[kind() for _ in range(count)]).double()


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def gradients(loss: Tensor, wanted: list[Tensor], **settings: Any) -> list[Tensor]:
    found = torch.autograd.grad(loss, wanted, allow_unused=True, **settings)
    return [torch.zeros_like(each) if grad is None else grad for grad, each in zip(found, wanted, strict=True)]


def trained(model: nn.Module, x: Tensor, between: Callable[[], Any] = lambda: None) -> list[Tensor]:
    """All that one forward and backward leave: output, gradients, buffers, the default generator."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = model(x)
    between()
    grads = gradients(out.square().sum(), [x, *model.parameters()])
    return [out, *grads, *[buffer.clone() for buffer in model.buffers()], torch.get_rng_state()]


def check_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def pair(kind: Callable[[], nn.Module] = Block, **settings: Any) -> tuple[nn.Sequential, nn.Sequential]:
    plain = stack(kind=kind)
    patched = copy.deepcopy(plain)
    checkpoint_blocks(patched, type(plain[0]), **settings)
    return plain, patched


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """The distinct memory that autograd is given to save."""
    seen: dict[int, int] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        total[0] = sum(seen.values())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


# ------------------------------------------------------------------------------------------------- language models


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("make, kind", LANGUAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_language_model_keeps_its_keys_loss_and_gradients_and_saves_less(
    make: Callable[[], nn.Module], kind: str, mode: str
) -> None:
    plain = make().double()
    getattr(plain, mode)()
    patched = copy.deepcopy(plain)
    blocks = checkpoint_blocks(patched, kind)
    assert len(blocks.names) == 4 and plain.config.use_cache and not patched.config.use_cache
    assert list(plain.state_dict()) == list(patched.state_dict())
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in patched.named_parameters()]
    assert [type(module) for module in plain.modules()] == [type(module) for module in patched.modules()]
    plain.config.use_cache = False  # a cache lays keys and values out in another way, and the last bits differ

    tokens = torch.randint(0, 31, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    found, held = [], []
    for model in (plain, patched):
        torch.manual_seed(3)
        with saved_bytes() as total:
            made = model(input_ids=tokens, attention_mask=mask, labels=tokens)
            held.append(total[0])
        found.append([made.loss, made.logits, *gradients(made.loss, list(model.parameters())), torch.get_rng_state()])
    check_equal(*found)
    assert held[1] < 0.7 * held[0]
    blocks.remove()
    assert patched.config.use_cache


def test_with_its_cache_a_language_model_differs_in_rounding_only() -> None:
    plain = gpt2().double()
    patched = copy.deepcopy(plain)
    checkpoint_blocks(patched, "GradientCheckpointingLayer")  # a base of GPT2Block
    tokens = torch.randint(0, 31, (2, 9))
    found = []
    for model in (plain, patched):
        torch.manual_seed(3)
        loss = model(input_ids=tokens, labels=tokens).loss
        found.append([loss, *gradients(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_cache_that_a_call_asks_for_is_refused_where_gradients_are_on() -> None:
    model = llama().double()
    checkpoint_blocks(model, "LlamaDecoderLayer")
    tokens = torch.randint(0, 31, (2, 9))
    with pytest.raises(ValueError, match="block 'model.layers.0' .* cache .*DynamicCache.*Call .* use_cache=False"):
        model(input_ids=tokens, labels=tokens, use_cache=True)
    with torch.no_grad():
        assert model(input_ids=tokens, use_cache=True).past_key_values.get_seq_length() == 9


@pytest.mark.parametrize("make, kind", LANGUAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_models_own_checkpointing_is_refused_before_and_after(make: Callable[[], nn.Module], kind: str) -> None:
    model = make()
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=f"{type(model).__name__} itself is on.*activation_checkpointing_disable"):
        checkpoint_blocks(model, kind)
    assert model.config.use_cache  # a refusal changes nothing
    model.activation_checkpointing_disable()
    checkpoint_blocks(model, kind)
    model.train().activation_checkpointing_enable()
    with pytest.raises(ValueError, match="itself is on"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long))


# ------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", [Block, Conv])
def test_gradients_statistics_and_generators_equal_the_plain_models(kind: Callable[[], nn.Module], mode: str) -> None:
    plain, patched = pair(kind)
    x = rows() if kind is Block else torch.randn(3, 2, 5, 5, dtype=torch.float64)
    for model in (plain, patched):
        getattr(model, mode)()
    for _ in range(3):  # which calls look at all values, and which believe them, makes no difference
        check_equal(trained(plain, x), trained(patched, x))


def test_spectral_norm_and_statistics_advance_once_a_forward_also_without_a_backward() -> None:
    plain, patched = pair()
    for _ in range(3):
        torch.manual_seed(1)
        plain(rows())
        torch.manual_seed(1)
        patched(rows())
    check_equal(list(plain.buffers()), list(patched.buffers()))


def test_a_gradient_penalty_has_the_plain_models_second_derivatives() -> None:
    found = []
    for model in pair():
        torch.manual_seed(3)
        x = rows().requires_grad_()
        wanted = [x, *model.parameters()]
        first = gradients(model(x).square().sum(), wanted, create_graph=True)
        second = gradients(sum(grad.square().sum() for grad in first), wanted, retain_graph=True)
        again = gradients(sum(grad.square().sum() for grad in first), wanted)
        check_equal(second, again)
        found.append([*first, *second, *model.buffers(), torch.get_rng_state()])
    check_equal(*found)


@pytest.mark.parametrize("retain", [False, True])
def test_batched_gradients_are_those_of_a_loop(retain: bool) -> None:
    """No random number may be drawn under vmap, so the recomputation steps outside."""
    _, patched = pair()
    x = rows().requires_grad_()
    for _ in range(2):
        torch.manual_seed(3)
        out, wanted = patched(x), [x, *patched.parameters()]
        vectors = torch.randn(5, *out.shape, dtype=torch.float64)
        how = {"allow_unused": True, "materialize_grads": True}
        loop = [torch.autograd.grad(out, wanted, vector, retain_graph=True, **how) for vector in vectors]
        state = torch.get_rng_state()
        found = torch.autograd.grad(out, wanted, vectors, is_grads_batched=True, retain_graph=retain, **how)
        assert torch.equal(torch.get_rng_state(), state)
        for grad, grads in zip(found, zip(*loop, strict=True), strict=True):
            torch.testing.assert_close(grad, torch.stack(grads))


@pytest.mark.parametrize("trained_before", [True, False])
@pytest.mark.parametrize("wants_input", [True, False])
def test_where_a_parameter_was_frozen_or_thawed_since_the_forward_gradients_are_the_plain_models(
    trained_before: bool, wants_input: bool
) -> None:
    found = []
    for model in pair():
        torch.manual_seed(3)
        weight = model[1].linear.weight.requires_grad_(trained_before)
        out = model(rows().requires_grad_(wants_input))
        weight.requires_grad_(not trained_before)
        out.square().sum().backward()
        assert weight.requires_grad is not trained_before and weight.grad is None  # as autograd does
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    check_equal(*found)


def test_third_derivatives_equal_the_plain_models() -> None:
    found = []
    for model in pair():
        for norm in [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]:
            norm.eval()  # from torch 2.14 on it has no third derivative in train mode
        torch.manual_seed(3)
        x = rows().requires_grad_()
        value = model(x).square().sum()
        for _ in range(2):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.pow(3).sum()
        found.append(gradients(value, [x, *model.parameters()]))
    check_equal(*found)


def test_a_graph_that_is_retained_gives_the_same_gradients_twice() -> None:
    plain, patched = pair()
    expected = trained(plain, rows())[1:]
    torch.manual_seed(3)
    x = rows().requires_grad_()
    loss = patched(x).square().sum()
    for retain in (True, False):
        grads = gradients(loss, [x, *patched.parameters()], retain_graph=retain)
        check_equal(grads, expected[: len(grads)])


class Typed(Flat):
    """What it multiplies by has the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.ones(4) / 3)


@pytest.mark.parametrize("change", ["eval", "dtype", "autocast"])
def test_what_changes_between_forward_and_backward_is_as_it_was(change: str) -> None:
    plain, patched = pair(Typed)
    found = []
    for model in (plain, patched):
        model.train()
        with torch.autocast("cpu") if change == "autocast" else nullcontext():
            between = {"eval": model.eval, "dtype": lambda: torch.set_default_dtype(torch.float64)}
            found.append(trained(model.float(), rows().float(), between.get(change, lambda: None)))
        assert model.training is (change != "eval")
        torch.set_default_dtype(torch.float32)
    check_equal(*found)


def test_autocast_is_restored_where_the_backward_is_outside_it() -> None:
    found = []
    for model in pair():
        model.float()
        torch.manual_seed(3)
        x = rows().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        found.append([out, *gradients(out.float().square().sum(), [x, *model.parameters()])])
    assert found[0][0].dtype == torch.float32
    check_equal(*found)


def test_a_backward_in_inference_mode_gives_the_same_gradients() -> None:
    found = []
    for model in pair():
        torch.manual_seed(3)
        x = rows().requires_grad_()
        loss = model(x).square().sum()
        with torch.inference_mode():
            found.append(gradients(loss, [x, *model.parameters()]))
    check_equal(*found)


class Noisy(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        private = torch.rand(4, generator=self.generator, dtype=x.dtype)
        host = random.random() + numpy.random.rand()
        return torch.tanh(self.linear(x)) * private * host * torch.rand(4, dtype=x.dtype)


def test_private_and_host_generators_are_replayed_and_left_as_they_are() -> None:
    found = []
    for patched in (False, True):
        random.seed(1)
        numpy.random.seed(1)
        model = stack(kind=Noisy)
        if patched:
            checkpoint_blocks(model, Noisy)
        for _ in range(5):
            made = trained(model, rows())
        states = [block.generator.get_state() for block in model]
        found.append([*made, *states, torch.tensor([random.random(), numpy.random.rand()])])
    check_equal(*found)


class Tree(nn.Module):
    """Takes and returns containers, with one tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)

    def forward(self, q: Tensor, *rest: Tensor, more: dict[str, Any]) -> dict[str, Any]:
        assert q is rest[0] and q is more["same"][0]
        out, weights = self.attention(q, *rest, need_weights=True)
        return {"out": (out * more["scale"], None), "weights": [weights], "name": more["name"]}


def test_arguments_and_results_are_pytrees_and_a_tensor_that_stands_twice_stays_one() -> None:
    plain = Tree().double()
    patched = copy.deepcopy(plain)
    checkpoint_blocks(patched, Tree)
    found = []
    for model in (plain, patched):
        torch.manual_seed(3)
        x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        made = model(x, x, x, more={"same": [x], "scale": scale, "name": "tree"})
        assert made["name"] == "tree" and made["out"][1] is None
        loss = made["out"][0].sum() + made["weights"][0].square().sum()
        found.append([loss, *gradients(loss, [x, scale, *model.parameters()])])
    check_equal(*found)


class Ragged(nn.Module):
    """Takes and returns rows of other lengths."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.factor)


def squares(model: nn.Module, pieces: list[Tensor]) -> Tensor:
    out = model(torch.nested.as_nested_tensor(pieces, layout=torch.jagged))
    return torch.cat(out.unbind()).square().sum()


def test_jagged_tensors_go_through_blocks_and_their_values_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, patched = pair(Ragged)
    pieces = [rows(length).requires_grad_() for length in (3, 1, 2)]
    for _ in range(3):  # two calls that validate, one that does not
        models = (plain, patched)
        check_equal(*[gradients(squares(model, pieces), [*pieces, *model.parameters()]) for model in models])
    loss = squares(patched, pieces)
    monkeypatch.setattr(Ragged, "factor", 2.0)
    with pytest.raises(CheckpointError, match="gave other values than its forward"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_output_is_compared_with_its_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Levels(Ragged):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            levels = torch.quantize_per_tensor(x.float() * self.factor, 0.1, 0, torch.qint8)
            return torch.tanh(self.linear(x)), levels

    plain, patched = pair(Levels)
    check_equal(*[gradients(model[0](rows())[0].sum(), list(model[0].parameters())) for model in (plain, patched)])
    out, _ = patched[0](rows())
    monkeypatch.setattr(Levels, "factor", 2.0)
    with pytest.raises(CheckpointError, match="gave other values than its forward"):
        out.sum().backward()


class Counting(nn.Module):
    """Depends on an attribute that every forward changes, and keeps what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = torch.tanh(self.linear(x)) * self.count
        return self.last


def test_attributes_are_as_at_the_forward_and_a_recomputation_leaves_no_trace() -> None:
    found = []
    for model in pair(Counting):
        x = rows().requires_grad_()
        loss = model(x).sum() + model(x).square().sum()
        last = model[0].last
        grads = gradients(loss, [x, *model.parameters()], retain_graph=True)
        assert model[0].last is last and [block.count for block in model] == [2, 2, 2]
        found.append([*grads, *gradients(model[0].last.sum(), [x, model[0].linear.weight])])
    check_equal(*found)


def test_weights_given_by_functional_call_are_those_of_the_recomputation() -> None:
    plain, patched = pair(Conv)
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    found = []
    for model in (plain, patched):
        torch.manual_seed(3)
        weights = {name: (2 * value).detach().requires_grad_() for name, value in model.named_parameters()}
        out = torch.func.functional_call(model, weights, (x,))
        found.append([out, *gradients(out.square().sum(), list(weights.values()))])
    check_equal(*found)


def test_torch_func_and_forward_mode_compute_as_ever() -> None:
    plain, patched = pair(Flat)
    found = []
    for model in (plain.eval(), patched.eval()):
        gradient = torch.func.grad(lambda x: model(x).square().sum())(rows())
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(model(forward_ad.make_dual(rows(), torch.ones_like(rows()))))
            found.append([gradient, torch.func.vmap(model)(rows()[:, None]), dual.primal, dual.tangent])
    check_equal(*found)


def test_a_weight_that_a_hook_of_the_block_sets_is_that_of_its_own_forward() -> None:
    plain = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh()).double()
    patched = copy.deepcopy(plain)
    checkpoint_blocks(patched, nn.Linear)
    found = []
    for model in (plain, patched):
        x = rows().requires_grad_()
        loss = model(x).square().sum() + 2 * model(x).sum()  # the second forward sets another weight
        found.append([loss, *gradients(loss, [x, *model.parameters()]), *model.buffers()])
    check_equal(*found)


def test_a_lazy_layer_gets_its_shape_in_its_first_checkpointed_forward() -> None:
    found = []
    for patched in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False))).double()
        if patched:
            checkpoint_blocks(model, lambda name, module: name == "0")
        found.append([*trained(model, rows()), *trained(model, rows())])
    check_equal(*found)


@pytest.mark.filterwarnings("ignore")  # what torch.compile itself warns of
def test_a_compiled_model_computes_the_same_and_its_blocks_are_not_looked_into() -> None:
    plain, patched = pair(Flat)
    compiled = torch.compile(patched, backend="eager")
    check_equal(trained(plain, rows()), trained(compiled, rows()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_torchs_own_checkpoint_gradients_equal_the_plain_models(reentrant: bool) -> None:
    found = []
    for model in pair(Flat):
        torch.manual_seed(3)
        x = rows().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        out.square().sum().backward()
        found.append([out, x.grad, *[weight.grad for weight in model.parameters()]])
    check_equal(*found)


class Gate(nn.Module):
    """A part of its input through, as autograd itself computes within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.drop(self.linear(x))).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - force


def test_a_block_that_calls_autograd_within_its_forward_equals_the_plain_one() -> None:
    plain, patched = pair(Gate)
    check_equal(trained(plain, rows()), trained(patched, rows()))


def test_a_recomputation_within_a_forward_is_told_that_it_drops_nothing() -> None:
    seen = []

    class Told(Gate):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return super().forward(x)

    model = Told()
    checkpoint_blocks(model, Told)
    model(torch.randn(2, 4, requires_grad=True))
    assert seen == [(True, False), (False, True)]


def test_modules_are_told_that_they_are_checkpointed_and_recomputed() -> None:
    seen = []

    class Told(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return super().forward(x).sin()

    model = nn.Sequential(Told(4, 4))
    with checkpoint_blocks(model, Told):
        model(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.randn(2, 4))
    model(torch.randn(2, 4)).sum().backward()
    assert seen == [(True, False), (False, True), (False, False), (False, False)]
    assert not is_checkpointing() and not is_recomputing()


def test_inputs_that_hooks_have_taken_elsewhere_are_not_held() -> None:
    plain, patched = pair()
    expected = trained(plain, rows())
    torch.manual_seed(3)
    x = rows().requires_grad_()
    with no_collector(), torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        hidden = x * 1
        out = patched(hidden)
        kept = weakref.ref(hidden)
        del hidden
        assert kept() is None
    check_equal(expected[1:2], gradients(out.square().sum(), [x]))


def test_what_is_kept_dies_with_the_graph() -> None:
    _, patched = pair()
    with no_collector():
        x = rows().requires_grad_()
        hidden = x * 2
        out = patched(hidden).sum()
        kept = weakref.ref(hidden)
        del hidden
        out.backward()
        del out
        assert kept() is None
        model = weakref.ref(patched)
        del patched, _
        assert model() is None


# -------------------------------------------------------------------------------------------------- which blocks


class Inner(nn.Linear):
    pass


def test_blocks_are_found_by_class_name_base_tuple_and_predicate() -> None:
    model = nn.Sequential(nn.Sequential(Inner(2, 2), nn.Conv1d(1, 1, 1)), Inner(2, 2))

    def names(match: Any) -> tuple[str, ...]:
        with checkpoint_blocks(model, match) as blocks:
            return blocks.names

    assert names(Inner) == names("Inner") == names("Linear") == ("0.0", "1")
    assert names((Inner, "Conv1d")) == ("0.0", "0.1", "1")
    assert names(lambda name, module: name == "0") == ("0",)
    assert names(lambda name, module: not name) == ("",)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("every, expected", [(1, "012345"), (2, "135"), (3, "25"), (4, "3"), (6, "5")])
def test_every_kth_block_is_taken(every: int, expected: str) -> None:
    model = nn.Sequential(*[Inner(2, 2) for _ in range(6)])
    assert checkpoint_blocks(model, Inner, every=every).names == tuple(expected)
    assert [index for index, block in enumerate(model) if "forward" in vars(block)] == [int(each) for each in expected]


@pytest.mark.parametrize("every", [1, 2])
def test_every_second_block_saves_less_than_none_and_more_than_all(every: int) -> None:
    held = []
    for settings in (None, {"every": 2}, {"every": 1}):
        model = stack(4)
        if settings:
            checkpoint_blocks(model, Block, **settings)
        with saved_bytes() as total:
            out = model(rows())
        held.append(total[0])
        del out
    assert held[0] > held[1] > held[2]


def test_a_second_call_changes_nothing_and_counts_nothing_twice() -> None:
    plain, patched = pair()
    forwards = [vars(block)["forward"] for block in patched]
    second = checkpoint_blocks(patched, Block)
    assert second.names == () and [vars(block)["forward"] for block in patched] == forwards
    assert checkpoint_blocks(patched, Block, every=3).names == ()
    second.remove()
    assert [vars(block)["forward"] for block in patched] == forwards
    check_equal(trained(plain, rows()), trained(patched, rows()))


def test_a_block_in_two_places_is_patched_once_and_computes_in_both() -> None:
    block = Block()
    plain = nn.Sequential(block, nn.Tanh(), block).double()
    patched = copy.deepcopy(plain)
    assert checkpoint_blocks(patched, Block).names == ("0",)
    check_equal(trained(plain, rows()), trained(patched, rows()))


def test_remove_gives_back_the_forward_of_the_class_and_of_the_instance() -> None:
    model = stack()

    def other(x: Tensor) -> Tensor:
        return 2 * x

    model[1].forward = other
    before = [dict(vars(block)) for block in model]
    blocks = checkpoint_blocks(model, Block)
    assert torch.equal(model[1](rows()), 2 * rows())
    assert list(inspect.signature(model[0].forward).parameters) == ["x", "scale"]
    blocks.remove()
    blocks.remove()
    assert [dict(vars(block)) for block in model] == before and model[1].forward is other


def test_remove_refuses_where_the_forward_was_replaced_since() -> None:
    model = stack()
    blocks = checkpoint_blocks(model, Block)
    ours, model[1].forward = model[1].forward, lambda x: x
    with pytest.raises(RuntimeError, match="block '1' was replaced after checkpoint_blocks"):
        blocks.remove()
    assert "forward" in vars(model[0])  # all or nothing
    model[1].forward = ours
    blocks.remove()
    assert not any("forward" in vars(block) for block in model)


def test_blocks_print_their_names_and_one_that_is_gone_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert repr(checkpoint_blocks(model, nn.Linear)) == "CheckpointedBlocks(0)"
    forward = model[0].forward
    del model
    gc.collect()
    with pytest.raises(ReferenceError, match="the checkpointed block '0' is gone, but its forward was called"):
        forward(torch.zeros(1, 4))


def pickled(model: nn.Sequential) -> nn.Sequential:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied, kind", [(copy.deepcopy, Block), (copy.deepcopy, Flat), (pickled, Flat)])
def test_a_copy_checkpoints_its_own_blocks_and_can_be_freed_of_it(
    copied: Callable[[nn.Sequential], nn.Sequential], kind: type[nn.Module]
) -> None:
    plain, patched = pair(kind)
    other = copied(patched)
    with torch.no_grad():
        for model in (plain, other):
            for weight in model.parameters():
                weight.mul_(0.5)
        for weight in patched.parameters():
            weight.fill_(float("nan"))
    with saved_bytes() as less:
        out = other(rows())
    with saved_bytes() as more:
        out = copy.deepcopy(plain)(rows())
    assert out.isfinite().all() and less[0] < more[0]
    plain.load_state_dict(other.state_dict())
    check_equal(trained(plain, rows()), trained(other, rows()))
    checkpoint_blocks(other, kind).remove()
    assert not any("forward" in vars(block) for block in other)
    assert all("forward" in vars(block) for block in patched)


def test_a_copy_of_a_language_model_gets_its_own_cache_setting_back() -> None:
    model = gpt2()
    blocks = checkpoint_blocks(model, "GPT2Block")
    other = copy.deepcopy(model)
    checkpoint_blocks(other, "GPT2Block").remove()
    assert other.config.use_cache and not model.config.use_cache
    blocks.remove()
    assert model.config.use_cache


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2"])
def test_every_must_be_a_positive_integer(every: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="every is .*Give a whole number of at least 1"):
        checkpoint_blocks(stack(), Block, every=every)


def test_every_beyond_the_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="every is 4, but only 3 modules match"):
        checkpoint_blocks(stack(), Block, every=4)


@pytest.mark.parametrize("match", [3, None, int, (Block, 3), [Block]])
def test_what_cannot_match_is_a_type_error(match: Any) -> None:
    with pytest.raises(TypeError, match="Use a module class, its name, a tuple of these, or a callable"):
        checkpoint_blocks(stack(), match)


def test_a_predicate_may_answer_with_anything_that_is_true_or_false() -> None:
    assert checkpoint_blocks(stack(), lambda name, module: re.fullmatch(r"[02]", name)).names == ("0", "2")


def test_where_nothing_matches_near_class_names_are_given() -> None:
    with pytest.raises(ValueError, match="no module matches Blocks. Near names in this model: Block."):
        checkpoint_blocks(stack(), "Blocks")
    with pytest.raises(ValueError, match="no module matches LSTM. The classes in this model: BatchNorm1d, Block, .*"):
        checkpoint_blocks(stack(), nn.LSTM)


def test_blocks_within_blocks_are_refused_unless_nested() -> None:
    plain, patched = pair()
    with pytest.raises(ValueError, match="block '0.linear' .* is within block '0' .*nested=True"):
        checkpoint_blocks(patched, nn.Linear)
    with pytest.raises(ValueError, match="is within block '' .*Sequential"):
        checkpoint_blocks(patched, nn.Sequential)
    assert len(checkpoint_blocks(patched, (nn.Linear, nn.BatchNorm1d), nested=True).names) == 9
    for _ in range(2):
        check_equal(trained(plain, rows()), trained(patched, rows()))


def test_a_nested_block_is_computed_once_more_for_each_level_around_it() -> None:
    calls = []

    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.depth, self.linear = depth, nn.Linear(4, 4)
            self.inner = Deep(depth - 1) if depth else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.depth)
            return torch.tanh(self.linear(self.inner(x)))

    model = Deep(2)
    checkpoint_blocks(model, Deep, nested=True)
    model(torch.randn(2, 4)).sum().backward()
    assert [calls.count(depth) for depth in (2, 1, 0)] == [2, 3, 4]


def test_a_block_called_within_another_that_does_not_contain_it_is_refused() -> None:
    inner = Inner(4, 4)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return inner(x)

    outer = Outer()
    checkpoint_blocks(outer, Outer)
    checkpoint_blocks(inner, Inner)
    with pytest.raises(RuntimeError, match=r"block '' \(Inner\) is checkpointed, and runs within .*nested=True"):
        outer(torch.randn(2, 4))


def change_weight(model: nn.Module, x: Tensor) -> None:
    model[1].linear.weight.mul_(2)


def change_input(model: nn.Module, x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize(
    "change, words",
    [(change_weight, "parameter 'linear.weight' of block '1'"), (change_input, "an input of block '0' .* in place")],
)
def test_a_change_in_place_between_forward_and_recomputation_is_an_error(change: Any, words: str) -> None:
    _, patched = pair()
    x = rows().clone()
    loss = patched(x).sum()
    with torch.no_grad():
        change(patched, x)
    with pytest.raises(CheckpointError, match=words):
        loss.backward()


def test_a_block_that_writes_its_own_parameter_is_told_so() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    checkpoint_blocks(model, nn.Embedding)
    loss = model(torch.arange(5)).sum()
    with pytest.raises(CheckpointError, match=r"If the block writes it itself \(nn.Embedding\(max_norm=...\)\)"):
        loss.backward()


def test_a_block_that_writes_its_input_is_an_error_at_the_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    checkpoint_blocks(model, nn.ReLU)
    with pytest.raises(CheckpointError, match="block '1' .* writes its input in place"):
        model(torch.randn(2, 4))


class Overwrites(nn.Module):
    """Writes in place into what autograd has saved, before or after the last tensor that it saves."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.outer, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x))
        if self.way == "activation":
            return x + self.outer(functional.silu(hidden, inplace=True))
        return x + hidden.mul_(2) * self.outer(x)


@pytest.mark.parametrize("way", ["activation", "product"])
@pytest.mark.parametrize("calls", range(1, 4))
def test_a_block_that_writes_what_autograd_saved_fails_in_the_backward_as_without_a_checkpoint(
    way: str, calls: int
) -> None:
    model = nn.Sequential(Overwrites(way), Overwrites(way))
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    checkpoint_blocks(model, Overwrites)
    for _ in range(calls):
        with pytest.raises(CheckpointError, match=r"shape \[3, 4\] .* modified by an inplace operation"):
            model(x).sum().backward()


class Outside(nn.Module):
    """Computes with a number that no module holds."""

    number: list[float] = [1.0]

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x) * self.number[0]
        if self.way == "saves fewer":
            return hidden.sin() + (0.0 * hidden.cos() if self.number[0] == 1.0 else 0.0)
        return [hidden.sin()] * int(self.number[0]) if self.way == "grows" else hidden.sin()


@pytest.mark.parametrize("way", ["values", "grows", "saves fewer"])
@pytest.mark.parametrize("calls", range(1, 6))
def test_state_that_cannot_be_put_back_is_found_by_its_values_in_every_call(way: str, calls: int) -> None:
    model = nn.Sequential(Outside(way))
    checkpoint_blocks(model, Outside)
    for call in range(calls):
        made = model(torch.randn(2, 4))
        if call < calls - 1:
            (made[0] if way == "grows" else made).sum().backward()
    Outside.number[0] = 3.0
    try:
        with pytest.raises(CheckpointError, match="recomputation of block '0' .* gave other values than its forward"):
            (made[0] if way == "grows" else made).sum().backward()
    finally:
        Outside.number[0] = 1.0


# ------------------------------------------------------------------------------------------------------ how far R goes


class Ends(nn.Module):
    """Ends with a product, whose values no gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ends = outside([])

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(torch.tanh(x))
        self.ends().append(is_recomputing())
        return out


def test_a_recomputation_ends_with_the_last_saved_tensor_except_in_validating_calls() -> None:
    plain, patched = pair(Ends)
    for call in range(1, 10):
        check_equal(trained(plain, rows()), trained(patched, rows()))
        ends = [block.ends() for block in plain]  # a deepcopy appends to the same
        assert ends == 3 * [[False, False] + [True] * validates(call)]
        for end in ends:
            end.clear()


class Saves(torch.autograd.Function):
    """The sine. Saves a number beside, of which its backward makes nothing, and asks twice for what is saved."""

    numbers = iter(range(100))

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.full((2,), float(next(Saves.numbers))))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        assert torch.equal(x, again)
        return grad * x.cos()


def test_saved_memory_that_nobody_has_written_is_no_reason_to_refuse() -> None:
    class Unwritten(Ends):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Saves.apply(x))  # type: ignore[no-untyped-call]

    plain, patched = pair(Unwritten)
    for _ in range(4):
        check_equal(trained(plain, rows()), trained(patched, rows()))


def test_where_a_block_takes_every_exception_for_its_own_it_still_ends() -> None:
    class Takes(Ends):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except BaseException:
                return x

    plain, patched = pair(Takes)
    for _ in range(4):
        check_equal(trained(plain, rows()), trained(patched, rows()))


# --------------------------------------------------------------------------------------------------- within a Pipe


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("checkpoint, nested", [("never", False), ("never", True), ("always", True)])
def test_within_a_pipe_they_equal_the_pipe_without_them(checkpoint: str, nested: bool, entry: str) -> None:
    found = []
    for model in pair(nested=nested):
        torch.manual_seed(3)
        pipe = Pipe(model, balance=[1, 2], chunks=2, checkpoint=checkpoint)
        for _ in range(3):
            if entry == "step":
                pipe.step(rows(), rows(), loss_fn=nn.functional.mse_loss)
            else:
                pipe(rows()).square().sum().backward()
        found.append([*[weight.grad for weight in model.parameters()], *model.buffers(), torch.get_rng_state()])
    check_equal(*found)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "dualpipev"])
def test_within_a_pipe_whose_backward_is_split_or_out_of_order_they_change_nothing(schedule: str) -> None:
    found = []
    for model in pair():
        torch.manual_seed(3)
        pipe = Pipe(model, balance=[1, 2], chunks=4, checkpoint="never", schedule=schedule)
        pipe.step(rows(8), rows(8), loss_fn=nn.functional.mse_loss)
        found.append([*[weight.grad for weight in model.parameters()], *model.buffers()])
    check_equal(*found)


def test_within_a_pipe_second_derivatives_equal_the_pipe_without_them() -> None:
    found = []
    for model in pair():
        torch.manual_seed(3)
        pipe = Pipe(model, balance=[1, 2], chunks=2, checkpoint="never")
        x = rows().requires_grad_()
        wanted = [x, *model.parameters()]
        first = gradients(pipe(x).square().sum(), wanted, create_graph=True)
        found.append([*first, *gradients(sum(grad.square().sum() for grad in first), wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_within_a_chunk_that_a_pipe_computes_again_they_are_refused() -> None:
    _, patched = pair()
    pipe = Pipe(patched, balance=[1, 2], chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match=r"block '0' .*or a Pipe.*Use checkpoint='never' in the Pipe.*nested=True"):
        pipe(rows())
