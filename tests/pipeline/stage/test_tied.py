"""Is a parameter that stands in several stages one parameter, wherever the stages compute?

    stage 0, place a    weight: lives here            alias on its memory --sum over chunks--+
    stage 1, place b                                                                         +--> one gradient
    stage 2, place c    weight: a copy for one call   alias of the copy   --sum over chunks--+    (stages in order)

The reference, `by_hand`, cuts every tie between stages by a deep copy, runs the plain layers chunk by chunk
(law_reference.py), and adds what the copies got, stage after stage. It knows no places, drivers, schedules or modes.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from by_chunks import call_seed, same
from cover import pairwise, some
from law_check import CHECKPOINTS, balance_of, row_loss, target_of
from law_models import normal
from law_reference import forward_only, reference, reference_step
from pipeline_probes import no_collector
from second_order_reference import Plain, assert_close, flat_orders, mix
from tied_models import KINDS, With, head, input_of, linear, made, symmetric, table
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from partition import split
from pipeline import GradStore, Pipe
from pipeline.common.errors import CheckpointError
from pipeline.common.places import Place

CPU = torch.device("cpu")
SEED = 23
PLACES = {"one": "***", "apart": "abcdef", "there and back": "abacab"}
ENTRIES = ("forward", "step", "store")
APART = {name: given for name, given in PLACES.items() if name != "one"}


pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")


def devices(places: str, stages: int) -> list[Place]:
    """A letter a stage; stages of one letter share a place."""
    return [Place(CPU, letter) for letter in PLACES[places][:stages].ljust(stages, PLACES[places][0])]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}
loss_fn = row_loss("mean")


# --------------------------------------------------------------------------------------------------- the reference


def by_hand(model: nn.Sequential, balance: Sequence[int], x: Tensor, y: Tensor, chunks: int, entry: str) -> Tensor:
    """One pass over untied copies of the stages. Adds to the model's `.grad`; returns the loss."""
    stages = split(model, balance)
    copies = [copy.deepcopy(stage) for stage in stages]
    apart = nn.Sequential(*(layer for stage in copies for layer in stage))
    seed = call_seed(SEED)
    if entry == "forward":
        result = reference(apart, x, chunks, seed, lambda out: loss_fn(out, y))
    else:
        result = reference_step(apart, x, y, chunks, seed, loss_fn)
    for stage, own in zip(stages, copies, strict=True):
        for owner, part in zip(stage.parameters(), own.parameters(), strict=True):
            if part.grad is not None:
                owner.grad = part.grad if owner.grad is None else owner.grad + part.grad
    assert result.loss is not None
    return result.loss


def grads_by_hand(model: nn.Sequential, x: Tensor, y: Tensor, entry: str = "step") -> list[Tensor | None]:
    """The gradients of 3 chunks with each layer a stage. Leaves every `.grad` None."""
    model.zero_grad()
    by_hand(model, [1] * len(model), x, y, 3, entry)
    return taken(model)


def taken(model: nn.Module) -> list[Tensor | None]:
    """The gradients, taken out."""
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def all_same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    return len(found) == len(wanted) and all(map(same, found, wanted))


def by_pipe(pipe: Pipe, x: Tensor, y: Tensor, entry: str) -> Tensor:
    """The same through an entry point of a Pipe."""
    torch.manual_seed(SEED)
    if entry == "forward":
        loss = loss_fn(pipe(x), y)
        loss.backward()
        return loss.detach()
    step = pipe.step(x, y, loss_fn=loss_fn, grads="store" if entry == "store" else "param")
    if step.grads is not None:
        assert all(parameter.grad is None for parameter in pipe.parameters())
        step.grads.assign()
    return step.loss


def trained(
    model: nn.Sequential, net: nn.Module, run: Callable[[], Tensor], optimizer: str, steps: int = 3
) -> list[Tensor]:
    """Losses and gradients of each step, and the parameters after the last."""
    stepper = OPTIMIZERS[optimizer](net.parameters())
    found: list[Tensor] = []
    for _ in range(steps):
        found.append(run())
        found.extend(torch.full((), torch.nan) if p.grad is None else p.grad.clone() for p in model.parameters())
        stepper.step()
        stepper.zero_grad()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


AXES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "balance": ("each alone", "halves", "first alone", "last alone"),
    "chunks": (1, 2, 3, 4, 8),
    "rows": (1, 5, 7, 8),
    "places": tuple(PLACES),
    "workers": ("inline", "threads"),
    "checkpoint": tuple(CHECKPOINTS),
    "schedule": ("gpipe", "1f1b"),
    "entry": ENTRIES,
    "optimizer": tuple(OPTIMIZERS),
}


def name_of(config: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in config.values())


def piped(model: nn.Sequential, config: dict[str, Any]) -> Pipe:
    balance = balance_of(config.get("balance", "each alone"), len(model))
    return Pipe(
        model,
        balance,
        config.get("chunks", 3),
        devices=devices(config["places"], len(balance)),
        workers=config.get("workers", "inline"),
        checkpoint=CHECKPOINTS[config.get("checkpoint", "always")],
        schedule=config.get("schedule", "1f1b"),
        mixes_rows=config.get("kind") == "in_some_chunks",
    )


@pytest.mark.parametrize("config", pairwise(AXES), ids=name_of)
def test_training_with_shared_parameters_is_the_sum_of_the_stages_parts_bit_for_bit(config):
    ours, theirs = made(config["kind"]), made(config["kind"])
    balance = balance_of(config["balance"], len(ours))
    x, y = input_of(config["kind"], config["rows"]), target_of(config["rows"])
    pipe = piped(ours, config)
    found = trained(ours, pipe, lambda: by_pipe(pipe, x, y, config["entry"]), config["optimizer"])
    wanted = trained(
        theirs, theirs, lambda: by_hand(theirs, balance, x, y, config["chunks"], config["entry"]), config["optimizer"]
    )
    assert all_same(found, wanted)


@pytest.mark.parametrize("config", pairwise({**AXES, "balance": ("each alone",)})[::2], ids=name_of)
def test_training_with_shared_parameters_equals_the_plain_modules_loop(config):
    """The plain module adds chunk after chunk over all stages at once: other roundings, the same sum."""
    ours, theirs = made(config["kind"]), made(config["kind"])
    x, y = input_of(config["kind"], config["rows"]), target_of(config["rows"])
    pipe = piped(ours, config)
    found = trained(ours, pipe, lambda: by_pipe(pipe, x, y, config["entry"]), "momentum")

    def loop() -> Tensor:
        loss = reference(theirs, x, config["chunks"], call_seed(SEED), lambda out: loss_fn(out, y)).loss
        assert loss is not None
        return loss

    wanted = trained(theirs, theirs, loop, "momentum")
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("kind", ["embedding_and_head", "layer_three_times"])
def test_numbers_depend_on_neither_place_nor_driver_nor_schedule_nor_checkpoint_mode(kind, entry):
    x, y = input_of(kind, 7), target_of(7)
    settings = some(product(PLACES, AXES["workers"], AXES["schedule"], ("always", "never")))
    first, *others = (
        trained(model, pipe, lambda: by_pipe(pipe, x, y, entry), "adam", steps=2)  # noqa: B023 called at once
        for places, workers, schedule, checkpoint in settings
        for model in [made(kind)]
        for pipe in [
            piped(model, dict(places=places, workers=workers, schedule=schedule, checkpoint=checkpoint))
        ]
    )
    assert all(all_same(other, first) for other in others)


def test_the_reference_tells_another_order_of_the_stages():
    """The comparison itself: the parts of three stages, added from the last to the first, are other bits."""
    model = made("layer_three_times")
    x, y = input_of("layer_three_times", 7), target_of(7)
    ascending = grads_by_hand(model, x, y, "forward")
    stages = split(model, [1] * 5)
    copies = [copy.deepcopy(stage) for stage in stages]
    apart = nn.Sequential(*(layer for stage in copies for layer in stage))
    reference(apart, x, 3, call_seed(SEED), lambda out: loss_fn(out, y))
    for stage, own in reversed(list(zip(stages, copies, strict=True))):
        for owner, part in zip(stage.parameters(), own.parameters(), strict=True):
            owner.grad = part.grad if owner.grad is None else owner.grad + part.grad
    descending = taken(model)
    assert_close(descending, ascending)
    assert not all_same(descending, ascending)


# ------------------------------------------------------------------------------------------------- one parameter


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_parameters_are_the_plain_modules_each_once(kind):
    model = made(kind)
    pipe = piped(model, {"places": "apart"})
    assert list(pipe.named_parameters()) == list(model.named_parameters())
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert len({id(parameter) for parameter in pipe.parameters()}) == len(list(pipe.parameters()))


def tied(places: str = "apart", **settings: Any) -> tuple[nn.Parameter, nn.Sequential, Pipe]:
    """The weight of an embedding and its head, the model, a Pipe of three stages."""
    torch.manual_seed(0)
    tokens = table()
    model = nn.Sequential(tokens, nn.Sequential(linear(), nn.Tanh()), head(tokens.weight))
    return tokens.weight, model, piped(model, {"places": places, **settings})


TOKENS, TARGET = torch.arange(21).view(7, 3) % 9, target_of(7)


@pytest.mark.parametrize("places", PLACES)
def test_a_shared_parameter_counts_once_in_every_norm(places):
    """Counted twice, the norm would be another, and so would be what is clipped to it."""
    _, model, pipe = tied(places)
    grads = grads_by_hand(model, TOKENS, TARGET)
    wanted = torch.cat([grad.flatten() for grad in grads]).norm()
    by_pipe(pipe, TOKENS, TARGET, "step")
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.1), wanted, rtol=1e-14, atol=0)
    model.zero_grad()
    store = pipe.step(TOKENS, TARGET, loss_fn=loss_fn, grads="store").grads
    assert len(store) == len(grads)
    torch.testing.assert_close(store.norm(), wanted, rtol=1e-14, atol=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stepper = torch.optim.SGD(pipe.parameters(), lr=1.0)
    pipe.step(TOKENS, TARGET, loss_fn=loss_fn, optimizer=stepper, clip_grad_norm=0.1)
    moved = [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    torch.testing.assert_close(torch.cat([each.flatten() for each in moved]).norm().item(), 0.1, rtol=1e-5, atol=0)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("places", PLACES)
def test_hooks_of_a_shared_parameter_run_once_on_the_whole_gradient(places, entry, checkpoint):
    weight, model, pipe = tied(places, checkpoint=checkpoint)
    whole = grads_by_hand(model, TOKENS, TARGET, entry)[0]
    seen: list[Any] = []
    weight.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    by_pipe(pipe, TOKENS, TARGET, entry)
    assert all(map(same, seen, [whole, 2 * whole])) and len(seen) == (1 if entry == "store" else 2)
    assert same(weight.grad, 2 * whole)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("places", PLACES)
def test_gradients_of_a_shared_parameter_accumulate_over_calls(places, entry):
    weight, model, pipe = tied(places)
    once = grads_by_hand(model, TOKENS, TARGET, entry)[0]
    for _ in range(3):
        by_pipe(pipe, TOKENS, TARGET, entry) if entry != "store" else add_from_a_store(pipe)
    assert same(weight.grad, once + once + once)


def add_from_a_store(pipe: Pipe) -> None:
    torch.manual_seed(SEED)
    pipe.step(TOKENS, TARGET, loss_fn=loss_fn, grads="store").grads.assign()


def test_stores_of_several_calls_merge_a_shared_parameter_once():
    weight, model, pipe = tied()
    once = grads_by_hand(model, TOKENS, TARGET, "step")[0]
    total = GradStore(pipe)
    for _ in range(2):
        total.merge_(pipe.step(TOKENS, TARGET, loss_fn=loss_fn, grads="store").grads)
    assert same(total.get("0.weight"), once + once) and same(total.get(weight), once + once)
    assert len(total) == 3 and weight.grad is None


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_gradient_that_a_sparse_and_a_dense_reader_share_is_their_sum(entry):
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        tokens = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
        return nn.Sequential(tokens, nn.Tanh(), head(tokens.weight))

    model, plain = build(), build()
    by_pipe(piped(model, {"places": "apart"}), TOKENS, TARGET, entry)
    loss_fn(plain(TOKENS), TARGET).backward()
    torch.testing.assert_close(model[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("entry", ["forward", "step"])
@pytest.mark.parametrize("places", PLACES)
def test_a_shared_parameter_that_the_loss_reads_too_gets_all_three_parts(places, entry):
    weight, model, pipe = tied(places)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return loss_fn(out, y) + weight.square().sum()

    wanted = torch.autograd.grad(loss(model(TOKENS), TARGET), weight)
    if entry == "forward":
        loss(pipe(TOKENS), TARGET).backward()
    else:
        pipe.step(TOKENS, TARGET, loss_fn=loss)
    assert_close([weight.grad], wanted)


# --------------------------------------------------------------------------------------------- where it is computed


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("mode", ["gradients", "no_grad"])
def test_a_shared_parameter_lives_with_its_first_stage_and_is_copied_only_to_other_places(places, workers, mode):
    shared, memory = nn.Parameter(torch.ones(4, dtype=torch.float64)), {}

    def noting(stage: int) -> With:
        def function(self: With, x: Tensor) -> Tensor:
            memory.setdefault(stage, set()).add(self.weight.data_ptr())
            return x * self.weight

        return With(function, weight=shared)

    model = nn.Sequential(*(noting(stage) for stage in range(3)))
    with torch.set_grad_enabled(mode == "gradients"):
        piped(model, {"places": places, "workers": workers})(normal(7, 4))
    assert memory[0] == {shared.data_ptr()} and all(len(seen) == 1 for seen in memory.values())
    letters = PLACES[places]
    for stage in (1, 2):
        assert (memory[stage] == memory[0]) == (letters[stage] == letters[0])


class Noted(nn.Module):
    """Computes with a weight, and keeps weak references to what it got."""

    def __init__(self, weight: nn.Parameter, seen: list[Any]) -> None:
        super().__init__()
        self.weight = weight
        self.note = seen.append  # a failed call puts back a list on a module

    def forward(self, x: Tensor) -> Tensor:
        self.note(weakref.ref(self.weight))
        return x * self.weight


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("entry", [*ENTRIES, "second order", "no_grad", "evaluate", "failure"])
def test_no_copy_outlives_its_call(entry, checkpoint, workers):
    seen: list[Any] = []
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    last = With(lambda self, x: 1 / 0, weight=weight) if entry == "failure" else nn.Identity()
    model = nn.Sequential(Noted(weight, seen), nn.Tanh(), Noted(weight, seen), last)
    pipe = piped(model, {"places": "apart", "checkpoint": checkpoint, "workers": workers})
    x = normal(7, 4)
    with no_collector():
        if entry == "failure":
            with pytest.raises(ZeroDivisionError):
                by_pipe(pipe, x, TARGET, "step")
        elif entry == "second order":
            (grad,) = torch.autograd.grad(loss_fn(pipe(x), TARGET), weight, create_graph=True)
            grad.square().sum().backward()
            del grad
        elif entry == "evaluate":
            pipe.evaluate(x, TARGET, loss_fn=loss_fn)
        elif entry == "no_grad":
            with torch.no_grad():
                pipe(x)
        else:
            by_pipe(pipe, x, TARGET, entry)
        assert len(seen) >= 2 and all(each() in (None, weight) for each in seen)  # no_grad at home: itself


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_copies_go_with_the_backward_though_the_loss_is_still_held(checkpoint):
    """A training loop holds its loss until the next one: two calls' copies at a time."""
    seen: list[Any] = []
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    pipe = piped(nn.Sequential(nn.Tanh(), Noted(weight, []), Noted(weight, seen)), {"places": "apart"})
    pipe.checkpoint = checkpoint
    with no_collector():
        loss = loss_fn(pipe(normal(7, 4)), TARGET)
        assert all(each() is not None for each in seen)
        loss.backward()
        assert all(each() is None for each in seen)
    assert loss.requires_grad


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize(
    "mode, places",
    [
        *product(["no_grad", "eval", "evaluate"], PLACES),
        ("inference", "one"),
        *(pytest.param("inference", places) for places in APART),
    ],
)
def test_outputs_without_gradients_are_the_plain_modules(places, mode, workers):
    model = made("embedding_and_head")
    pipe = piped(model, {"places": places, "workers": workers})
    pipe.train(mode != "eval")
    seed = call_seed(SEED)
    if mode == "evaluate":
        found = pipe.evaluate(TOKENS, TARGET, loss_fn=loss_fn).outputs
        model.eval()
    else:
        with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode == "eval"):
            found = pipe(TOKENS)
    with torch.no_grad():
        assert same(found.detach(), forward_only(model, TOKENS, 3, seed))


def test_a_parameter_made_in_inference_mode_may_be_shared():
    with torch.inference_mode():
        _, model, pipe = tied()
        assert same(pipe(TOKENS), forward_only(model, TOKENS, 3, 0))


@pytest.mark.parametrize("write", [lambda p: p.mul_(2), lambda p: p.data.mul_(2), lambda p: p.data.copy_(p.data * 2)])
@pytest.mark.parametrize("grad", [True, False])
def test_each_call_copies_what_the_parameter_holds_then(write, grad):
    weight, model, pipe = tied()
    for _ in range(3):
        with torch.no_grad():
            write(weight)
        with torch.set_grad_enabled(grad):
            assert same(pipe(TOKENS).detach(), forward_only(model, TOKENS, 3, 0).detach())


# ------------------------------------------------------------------------------------ ties made, kept and cut later


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_tie_made_or_cut_after_the_pipe_was_built_counts_from_the_next_call(places, entry):
    torch.manual_seed(0)
    model = nn.Sequential(table(), linear(), nn.Linear(4, 9, bias=False, dtype=torch.float64))
    pipe = piped(model, {"places": places})
    for tie in (lambda: model[0].weight, lambda: nn.Parameter(model[0].weight.detach() * 2), lambda: model[0].weight):
        model[2].weight = tie()
        wanted = grads_by_hand(model, TOKENS, TARGET, entry)
        by_pipe(pipe, TOKENS, TARGET, entry)
        assert [parameter is model[0].weight for parameter in pipe.parameters()].count(True) == 1
        assert all_same(taken(model), wanted)


@pytest.mark.parametrize("keep_vars", [True, False])
def test_load_state_dict_assign_ties_what_it_ties_in_the_plain_module(keep_vars):
    _, source, _ = tied()
    _, model, pipe = tied()
    _, plain, _ = tied()
    with torch.no_grad():
        source[0].weight.mul_(2)
    state = source.state_dict(keep_vars=keep_vars)
    pipe.load_state_dict(state, assign=True)
    plain.load_state_dict(state, assign=True)
    assert (model[0].weight is model[2].weight) == (plain[0].weight is plain[2].weight) == keep_vars
    wanted = grads_by_hand(plain, TOKENS, TARGET, "step")
    by_pipe(pipe, TOKENS, TARGET, "step")
    assert all_same(taken(model), wanted)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("given", [["0.weight"], ["2.weight"], ["0.weight", "2.weight"]])
@pytest.mark.parametrize("tie", [True, False])
def test_functional_call_replaces_a_shared_parameter_as_in_the_plain_module(places, given, tie):
    weight, model, pipe = tied(places)
    base = normal(9, 4, seed=5).requires_grad_()
    fresh = base.tanh()  # no leaf
    values = {name: fresh if tie or name == "0.weight" else fresh * 2 for name in given}
    nets: list[tuple[nn.Module, Any]] = [(pipe, pipe), (Plain(model, 3), model)]
    found = []
    for net, named in nets:
        prefix = "" if named is pipe else "model."
        out = torch.func.functional_call(net, {prefix + k: v for k, v in values.items()}, (TOKENS,), tie_weights=tie)
        targets = [base, *model.parameters()]
        grads = torch.autograd.grad(loss_fn(out, TARGET), targets, allow_unused=True, retain_graph=True)
        found.append([out.detach(), *grads])
    assert_close(*found)
    assert model[0].weight is weight and model[2].weight is weight


def test_a_copy_of_a_pipe_keeps_its_ties_to_itself():
    weight, model, pipe = tied()
    twin = copy.deepcopy(pipe)
    assert twin[0].weight is twin[2].weight is not weight
    wanted = grads_by_hand(model, TOKENS, TARGET, "step")[0]
    by_pipe(twin, TOKENS, TARGET, "step")
    assert same(twin[0].weight.grad, wanted) and weight.grad is None


def test_a_cast_keeps_the_tie():
    weight, model, pipe = tied()
    pipe.to(torch.float32)
    assert model[0].weight is model[2].weight and model[0].weight.dtype is torch.float32
    loss_fn(pipe(TOKENS), TARGET.float()).backward()
    assert model[0].weight.grad.dtype is torch.float32


@pytest.mark.parametrize("places", PLACES)
def test_a_shared_parameter_may_be_frozen_and_freed_between_calls(places):
    weight, model, pipe = tied(places)
    for trains in (True, False, True):
        weight.requires_grad_(trains)
        wanted = grads_by_hand(model, TOKENS, TARGET, "step")
        by_pipe(pipe, TOKENS, TARGET, "step")
        assert (weight.grad is None) == (not trains)
        assert all_same(taken(model), wanted)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_pipe_within_a_pipe_shares_parameters_with_the_stages_around_it(checkpoint, workers):
    torch.manual_seed(0)
    tokens, shared = table(), linear()
    inside = nn.Sequential(shared, nn.Tanh(), head(tokens.weight), linear(9, 4), shared)
    plain = nn.Sequential(tokens, inside, head(tokens.weight))
    wanted = torch.autograd.grad(loss_fn(plain(TOKENS), TARGET), list(plain.parameters()))
    config = {"places": "apart", "checkpoint": checkpoint, "workers": workers}
    by_pipe(piped(nn.Sequential(tokens, piped(inside, config), head(tokens.weight)), config), TOKENS, TARGET, "forward")
    assert_close([parameter.grad for parameter in plain.parameters()], wanted)


# ------------------------------------------------------------------------------------------------------ second order

TWICE = ("embedding_and_head", "layer_three_times", "in_some_chunks", "transposed", "weight_norm", "frozen")


@pytest.mark.parametrize(
    "config",
    pairwise({
        "kind": TWICE,
        "places": tuple(PLACES),
        "workers": ("inline", "threads"),
        "checkpoint": tuple(CHECKPOINTS),
        "chunks": (1, 3),
    }),
    ids=name_of,
)
def test_second_derivatives_equal_the_plain_modules(config):
    model, plain = made(config["kind"]), made(config["kind"])
    x, y = input_of(config["kind"], 5), target_of(5)
    found = []
    for own, net in [(model, piped(model, config)), (plain, Plain(plain, config["chunks"]))]:
        targets = [parameter for parameter in own.parameters() if parameter.requires_grad]
        call_seed(SEED)
        found.append(flat_orders(loss_fn(net(x), y), targets, 2))
    assert_close(*found, rtol=1e-11)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("places", PLACES)
def test_a_hessian_vector_product_equals_the_plain_modules_along_the_tie(places, checkpoint):
    weight, model, pipe = tied(places, checkpoint=checkpoint)
    parameters = list(model.parameters())
    vector = [normal(*parameter.shape, seed=number) for number, parameter in enumerate(parameters)]
    products = []
    for net in (pipe, model):
        grads = torch.autograd.grad(loss_fn(net(TOKENS), TARGET), parameters, create_graph=True)
        products.append(torch.autograd.grad(grads, parameters, vector))
    assert_close(*products)


@pytest.mark.parametrize("places", PLACES)
def test_gradgradcheck_through_a_shared_layer(places):
    shared = linear(2, 2)
    pipe = piped(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared), {"places": places})

    def through(weight: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(pipe, {"0.weight": weight}, (x,))

    weight = shared.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(through, (weight, normal(3, 2).requires_grad_()))


def test_the_second_derivative_reaches_hooks_and_grads_of_a_shared_parameter_once():
    weight, model, pipe = tied()
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss_fn(pipe(TOKENS), TARGET), parameters, create_graph=True)
    seen.clear()
    mix(grads).backward()
    assert len(seen) == 1 and same(seen[0].detach(), weight.grad.detach())


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_buffer_that_two_stages_share_is_refused_by_name():
    norm = nn.BatchNorm1d(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="buffer '2.running_mean' is shared by stages 0 and 2"):
        piped(nn.Sequential(norm, linear(), norm), {"places": "apart"})
    shared = parametrizations.spectral_norm(linear())
    with pytest.raises(RuntimeError, match="_u. of stage 2 .* is shared with stage 0|chunk, left elsewhere"):
        piped(nn.Sequential(shared, nn.Tanh(), shared), {"places": "one", "checkpoint": "never"})(normal(5, 4))
    Pipe(nn.Sequential(norm, norm, linear()), [2, 1])  # within one stage it is nobody else's


def averaging() -> With:
    def function(self: With, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return x * self.mean.clone()

    layer = With(function)
    layer.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
    return layer


@pytest.mark.parametrize("how", ["tied later", "a view of it"])
def test_a_buffer_that_two_stages_write_is_refused_however_they_came_to_share_it(how):
    """Whose turn it is differs between schedules and drivers, so the numbers would."""
    model = nn.Sequential(averaging(), linear(), averaging())
    if how == "a view of it":
        model[2].mean = model[0].mean.view(4)
    with pytest.raises((ValueError, RuntimeError), match="share"):
        pipe = piped(model, {"places": "one", "checkpoint": "never"})
        model[2].mean = model[0].mean if how == "tied later" else model[2].mean
        pipe(normal(7, 4))


def test_a_generator_that_stages_in_several_threads_draw_from_is_refused():
    """Which thread draws first is chance, so the numbers would be. (One thread draws in one fixed order.)"""
    noise = With(lambda self, x: x + torch.rand(x.shape, generator=self.generator, dtype=torch.float64))
    noise.generator = torch.Generator()
    model = nn.Sequential(noise, linear(), noise)
    with pytest.raises((ValueError, RuntimeError), match="[Gg]enerator"):
        piped(model, {"places": "one", "checkpoint": "never", "workers": "threads"})(normal(7, 4))


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def writing(model: nn.Sequential, stage: int, write: Callable[[Any], None]) -> None:
    """From now on the layer of this stage writes its weight before it computes."""
    model[stage].register_forward_pre_hook(lambda layer, _: write(layer.weight))


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("mode", ["forward", "step", "no_grad"])
def test_a_forward_that_writes_a_copy_in_place_is_refused_by_name(mode, workers):
    weight, model, pipe = tied(checkpoint="never", workers=workers)
    writing(model, 2, in_place)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' of .*, which it shares with an earlier stage"):
        with torch.set_grad_enabled(mode != "no_grad"):
            pipe(TOKENS) if mode != "step" else by_pipe(pipe, TOKENS, TARGET, "step")
    assert same(weight, before) and weight.grad is None


@pytest.mark.parametrize(
    "entry",
    ["forward", "step"],
)
def test_a_forward_that_writes_a_copy_in_place_is_refused_by_name_under_recomputation(entry):
    _, model, pipe = tied(checkpoint="always")
    writing(model, 2, in_place)
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' of .*, which it shares with an earlier stage"):
        by_pipe(pipe, TOKENS, TARGET, entry)


def new_data(weight: Tensor) -> None:
    weight.data = weight.data * 0.5


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_that_gives_a_copy_new_data_is_refused_by_name(grad, calls):
    """A limit on the norm of a layer's weight is often written so. Set on a copy it would be forgotten."""
    weight, model, pipe = tied(checkpoint="never")
    with torch.set_grad_enabled(grad):
        for _ in range(calls - 1):
            pipe(TOKENS)
        writing(model, 2, new_data)
        with pytest.raises(RuntimeError, match=r"parameter '2.weight'"):
            pipe(TOKENS)


@pytest.mark.parametrize("wide", [4, 16, 64, 256])
def test_new_data_of_a_copy_are_seen_however_often_its_memory_is_given_away(wide):
    """After two chunks the new data may lie where the first ones did."""
    shared = nn.Linear(wide, wide)
    for chunks in range(1, 7):
        model = nn.Sequential(shared, nn.Tanh(), nn.Linear(wide, wide))
        model[2].weight = shared.weight
        pipe = piped(model, {"places": "apart", "chunks": chunks})
        for _ in range(2):  # the third call does not compare all values
            pipe(torch.ones(6, wide))
        writing(model, 2, new_data)
        with pytest.raises(RuntimeError, match=r"parameter '2.weight'"):
            pipe(torch.ones(6, wide))


@pytest.mark.parametrize("write", [in_place, lambda weight: weight.data.mul_(0.5)])
@pytest.mark.parametrize("places", ["one", "there and back"])
def test_a_forward_that_writes_its_parameter_at_home_does_what_it_does_in_the_plain_module(places, write):
    ours, theirs = tied(places, chunks=1), tied(places, chunks=1)
    for weight, model, net in [(ours[0], ours[1], ours[2]), (theirs[0], theirs[1], theirs[1])]:
        writing(model, 2, write)
        with torch.no_grad():
            net(TOKENS)
    assert same(ours[0], theirs[0]) and not same(ours[0], tied(places)[0])


@pytest.mark.parametrize("mode", ["forward", "step", "no_grad"])
@pytest.mark.parametrize("how", ["max_norm", "hook"])
def test_a_home_stage_that_writes_a_parameter_others_have_copied_is_refused_by_name(how, mode):
    """The plain module's head sees what the embedding wrote (max_norm does so); a copy is older."""
    weight, model, pipe = tied(checkpoint="never")
    if how == "max_norm":
        model[0].max_norm = 0.5
    else:
        writing(model, 0, in_place)
    with pytest.raises(RuntimeError, match="parameter '2.weight'.* stage 2"):
        with torch.set_grad_enabled(mode != "no_grad"):
            pipe(TOKENS) if mode != "step" else by_pipe(pipe, TOKENS, TARGET, "step")


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("then", ["backward", "create_graph"])
def test_a_shared_parameter_written_between_forward_and_recomputation_is_an_error_by_name(places, then):
    weight, _, pipe = tied(places)
    loss = loss_fn(pipe(TOKENS), TARGET)
    in_place(weight)
    with pytest.raises(CheckpointError, match="parameter '[02].weight'.* was changed in place between the forward"):
        if then == "backward":
            loss.backward()
        else:
            torch.autograd.grad(loss, weight, create_graph=True)
    assert weight.grad is None


@pytest.mark.parametrize("places", PLACES)
def test_a_shared_parameter_written_after_a_kept_forward_gives_an_error_or_the_gradient_of_then(places):
    """At home autograd's version counter tells; a copy is as it was."""
    weight, model, pipe = tied(places, checkpoint="never")
    wanted = grads_by_hand(model, TOKENS, TARGET, "forward")[0]
    loss = loss_fn(pipe(TOKENS), TARGET)
    in_place(weight)
    if places == "apart":
        loss.backward()
        assert same(weight.grad, wanted)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.probes
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("places", PLACES)
def test_a_call_caches_no_weight(places, checkpoint):
    """`parametrize.cached` around it would hand a weight, and its graph, to other chunks and stages."""
    found = []
    for within in (nullcontext, parametrize.cached):
        torch.manual_seed(0)
        shared = symmetric(linear())
        pipe = piped(nn.Sequential(shared, nn.Tanh(), shared), {"places": places, "checkpoint": checkpoint})
        with within():
            weight = shared.weight
            (pipe(normal(7, 4)).sum() + weight.exp().sum()).backward()
            assert (shared.weight is weight) == (within is not nullcontext)
        found.append(taken(pipe))
    assert all_same(*found)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("places", PLACES)
def test_a_failure_behind_a_copy_leaves_everything_as_found(places, workers):
    weight, model, pipe = tied(places, workers=workers)
    weight.grad = normal(9, 4)
    before = weight.detach().clone(), weight.grad.clone()
    hook = model[2].register_forward_pre_hook(lambda layer, x: 1 / 0 if x[0][0, 0, 0] != 0 else None)
    with pytest.raises(ZeroDivisionError):
        by_pipe(pipe, TOKENS, TARGET, "step")
    hook.remove()
    assert model[0].weight is model[2].weight is weight and same(weight, before[0]) and same(weight.grad, before[1])
    weight.grad = None
    by_pipe(pipe, TOKENS, TARGET, "step")
    assert all_same(taken(model), grads_by_hand(model, TOKENS, TARGET))
