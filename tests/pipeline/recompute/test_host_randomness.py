"""Law 4 for generators outside torch: Python's and numpy's belong to (seed of the call, chunk, layer) as torch's do."""

import random
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy
import pytest
import torch
from cover import either
from torch import Tensor, nn

import scheduler
from pipeline import Pipe, is_recomputing, layer_seed
from pipeline.gradients.eager import EagerUpdate
from pipeline.recompute.randomness import draw_seed

ROWS, WIDTH, CHUNKS = 16, 5, 8
POLICIES = ("always", "except_last", "never")
SOURCES = {
    "python": random.random,
    "python's normal": lambda: random.gauss(1.0, 0.1),  # of two at a time: one is kept for later
    "numpy": lambda: float(numpy.random.rand()),
    "numpy's normal": lambda: float(numpy.random.randn()),
    "torch": lambda: float(torch.rand(())),
}


class Scaled(nn.Module):
    """Times a number from each of some sources."""

    def __init__(self, *sources: str) -> None:
        super().__init__()
        self.sources = sources or tuple(SOURCES)

    def forward(self, x: Tensor) -> Tensor:
        for source in self.sources:
            x = x * (0.5 + SOURCES[source]())
        return x


class Depth(nn.Linear):
    """Stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


class NoisyBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: grad * (0.5 + random.random()) * (0.5 + float(numpy.random.rand())))
        return y


def drawing() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Linear(WIDTH, WIDTH), Scaled(), Depth(WIDTH, WIDTH), nn.Tanh(), Scaled("numpy"), Depth(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), Scaled()).double()


def batch() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).double()


def noisy_loss(out: Tensor, target: object) -> Tensor:
    """With a little noise: with more it would be refused, since it could not be cut into chunks."""
    return (out.square() * (1 + 1e-10 * random.random() + 1e-10 * float(numpy.random.rand()))).sum()


def same(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def seed_all(number: int) -> None:
    """The public rule."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def by_hand(model: nn.Sequential, x: Tensor, has_loss: bool) -> list[Tensor]:
    """Output, loss and gradients of the plain module, chunk by chunk, seeded by the public rule."""
    torch.manual_seed(9)
    seed, outs = draw_seed(), []
    value = torch.zeros(()).double()
    for chunk, part in enumerate(x.tensor_split(CHUNKS)):
        for layer, module in enumerate(model):
            seed_all(layer_seed(seed, chunk, layer))
            part = module(part)
        outs.append(part.detach())
        if has_loss:
            seed_all(layer_seed(seed, chunk, len(model)))
        loss = noisy_loss(part, None) if has_loss else part.square().sum()
        loss.backward()
        value = value + loss.detach()
    return [torch.cat(outs), value, *[param.grad for param in model.parameters()]]


def host_states() -> list[Any]:
    return [random.getstate(), [str(part) for part in numpy.random.get_state()]]


def configurations() -> list[tuple[str, list[int], str, str]]:
    """Every schedule with some balance, checkpoint mode and driver."""
    policies, workers, found = cycle(POLICIES), cycle(["inline", "threads"]), []
    for name in scheduler.names():
        for balance in either([[1, 3, 3, 1]], [[2, 2, 2, 2], [1, 3, 3, 1]]):
            found.append((name, balance, next(policies), next(workers)))
    return found


@pytest.mark.parametrize("schedule, balance, policy, workers", configurations())
def test_numbers_drawn_outside_torch_are_those_of_the_public_rule_in_every_entry_point(
    schedule: str, balance: list[int], policy: str, workers: str
) -> None:
    x = batch()
    of_step, of_forward = by_hand(drawing(), x, True), by_hand(drawing(), x, False)
    random.seed(1)
    numpy.random.seed(1)
    before = host_states()
    model = drawing()
    pipe = Pipe(model, balance, CHUNKS, schedule=schedule, checkpoint=policy, workers=workers)
    for entry in ("step", "forward", "evaluate", "no_grad") * either(2, 3):  # in calls that compare, and in others
        model.zero_grad()
        torch.manual_seed(9)
        if entry == "step":
            step = pipe.step(x, loss_fn=noisy_loss, loss_reduction="sum", outputs=True)
            found = [step.outputs, step.loss, *[param.grad for param in model.parameters()]]
            expected = of_step
        elif entry == "forward":
            out = pipe(x)
            loss = torch.stack([part.square().sum() for part in out.tensor_split(CHUNKS)])
            loss.sum().backward()
            found = [out.detach(), *[param.grad for param in model.parameters()]]
            expected = [of_forward[0], *of_forward[2:]]
        elif entry == "evaluate":
            found = [pipe.evaluate(x, loss_fn=noisy_loss, loss_reduction="sum").outputs]
            expected = of_step[:1]
        else:
            with torch.no_grad():
                found = [pipe(x)]
            expected = of_step[:1]
        assert same(found, expected), entry
        assert host_states() == before, entry


@pytest.mark.parametrize("policy", POLICIES)
def test_second_derivatives_see_the_numbers_of_the_forward(policy: str) -> None:
    found = []
    for is_piped in (False, True):
        model = drawing()
        torch.manual_seed(9)
        if is_piped:
            out = Pipe(model, [3, 3, 2], CHUNKS, checkpoint=policy)(batch())
            random.random()
        else:
            seed, parts = draw_seed(), []
            for chunk, part in enumerate(batch().tensor_split(CHUNKS)):
                for layer, module in enumerate(model):
                    seed_all(layer_seed(seed, chunk, layer))
                    part = module(part)
                parts.append(part)
            out = torch.cat(parts)
        params = list(model.parameters())
        before = host_states()
        grads = torch.autograd.grad(out.square().sum(), params, create_graph=True)
        assert host_states() == before
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), params))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_numbers_drawn_in_a_backward_are_the_same_for_every_schedule_checkpoint_mode_and_driver(entry: str) -> None:
    found = []
    for schedule, policy, workers in [
        ("gpipe", "always", "inline"), ("1f1b", "never", "inline"), ("zb-h1", "except_last", "inline"),
        ("gpipe", "never", "threads"), ("1f1b", "always", "threads"),
    ]:  # fmt: skip
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NoisyBackward(), nn.Linear(WIDTH, WIDTH), NoisyBackward())
        pipe = Pipe(model.double(), [2, 2], CHUNKS, schedule=schedule, checkpoint=policy, workers=workers)
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(9)
            before = host_states()
            if entry == "forward":
                pipe(batch()).sum().backward()
            else:
                pipe.step(batch(), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
            assert host_states() == before
            found.append([param.grad for param in model.parameters()])
    assert all(same(grads, found[0]) for grads in found)


@pytest.mark.parametrize("workers", ["inline", "threads"])
def test_a_stage_that_begins_to_draw_outside_torch_draws_its_seeds_numbers(workers: str) -> None:
    """From one column of many, in a call that looks at less than the first did."""

    class Late(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            scale = torch.ones(300, dtype=x.dtype)
            if Late.calls >= 3:
                scale[7] = random.random() + numpy.random.rand()
            return x * scale

    found = []
    for policy in ("never", "always"):
        Late.calls = 1
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(WIDTH, 300), Late(), nn.Linear(300, WIDTH), Late()).double()
        model[3].forward = lambda x: x
        pipe = Pipe(model, [2, 2], 4, checkpoint=policy, workers=workers)
        for Late.calls in range(1, 4):
            model.zero_grad()
            before = host_states()
            torch.manual_seed(9)
            pipe.step(batch(), loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
            assert host_states() == before
        found.append([param.grad for param in model.parameters()])
    assert same(*found)


# ------------------------------------------------------------------------------------------------- after a failure


class Fails(nn.Module):
    """Draws, then raises: in F, in the recomputation, or in B."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._draw(self.when == "R" if is_recomputing() else self.when == "F" and self.calls == 2)
        y = x * 1
        if self.when == "B" and y.requires_grad:
            y.register_hook(lambda grad: self._draw(True))
        return y

    def _draw(self, fails: bool) -> None:
        for draw in SOURCES.values():
            draw()
        if fails:
            raise KeyError(self.when)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("entry", ["forward", "step", "eager", "loss", "refused loss"])
@pytest.mark.parametrize("when, policy", [("F", "never"), ("F", "always"), ("R", "always"), ("B", "never")])
def test_a_failed_call_leaves_pythons_and_numpys_generators_as_they_were(
    workers: str, entry: str, when: str, policy: str
) -> None:
    has_bad_loss = "loss" in entry
    model = nn.Sequential(nn.Linear(3, 3), Scaled() if has_bad_loss else Fails(when))
    pipe = Pipe(model, [1, 1], 3, checkpoint=policy, workers=workers)

    def loss(out: Tensor, target: object) -> Tensor:
        random.random(), numpy.random.rand()
        if entry == "loss":
            raise KeyError(when)
        return out.sum() + (100 if entry == "refused loss" else 0)

    before = host_states()
    with pytest.raises(ValueError if entry == "refused loss" else KeyError):
        if entry == "forward":
            pipe(torch.ones(6, 3)).sum().backward()
        elif entry == "eager":
            update = EagerUpdate(torch.optim.SGD(model.parameters(), lr=0.1))
            pipe.step(torch.ones(6, 3), loss_fn=loss, loss_reduction="sum", optimizer=update)
        else:
            pipe.step(torch.ones(6, 3), loss_fn=loss, loss_reduction="mean" if has_bad_loss else "sum")
    assert host_states() == before


@pytest.mark.parametrize("policy", POLICIES)
def test_both_runs_of_an_eager_step_draw_the_same_numbers(policy: str) -> None:
    found = []
    for is_eager in (False, True):
        model = drawing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options: dict[str, Any] = {"optimizer": optimizer, "clip_grad_norm": 1e-2}
        if is_eager:
            options = {"optimizer": EagerUpdate(optimizer, clip="two_pass", max_norm=1e-2)}
        pipe = Pipe(model, [2, 2, 2, 2], CHUNKS, checkpoint=policy)
        torch.manual_seed(9)
        before = host_states()
        losses = [
            pipe.step(batch(), loss_fn=noisy_loss, loss_reduction="sum", **options).loss for _ in range(3)
        ]
        assert host_states() == before
        found.append([*losses, *[param.detach() for param in model.parameters()]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------------------------------------ private generators

PRIVATE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "random.Random": lambda: random.Random(3),
    "RandomState": lambda: numpy.random.RandomState(3),
    **{
        kind: lambda kind=kind: numpy.random.Generator(getattr(numpy.random, kind)(3))
        for kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    },
    "bits": lambda: numpy.random.PCG64(3),
}


def drawn_from(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.randn((), generator=generator))
    if isinstance(generator, random.Random):
        return generator.gauss(0.0, 1.0)
    if isinstance(generator, numpy.random.BitGenerator):
        return int(generator.random_raw()) / 2**64
    return float(generator.standard_normal())


class Private(nn.Module):
    """Has a generator of its own, of which it uses one number for one column of 300, from some chunk on."""

    def __init__(self, generator: Any, start: int) -> None:
        super().__init__()
        self.generator = generator
        self.start = start
        self.fails = False
        self.register_buffer("chunk", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        now = int(self.chunk)
        self.chunk.add_(1)
        scale = torch.ones(300, dtype=x.dtype)
        if now >= self.start:
            scale[7] = drawn_from(self.generator)
        if self.fails and now % 4 == 2:
            raise KeyError("private")
        return x * scale


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize("kind", PRIVATE)
def test_a_private_generator_of_any_kind_is_replayed_and_put_back_after_a_failure(kind: str, start: int) -> None:
    found = []
    for policy, schedule in (("plain", ""), ("never", "1f1b"), ("always", "gpipe"), ("always", "zb-h1")):
        torch.manual_seed(5)
        own, other = PRIVATE[kind](), PRIVATE[kind]()
        drawn_from(other)
        layers = [nn.Linear(WIDTH, 300), Private(own, start), Private(other, start), nn.Linear(300, WIDTH)]
        model = nn.Sequential(*layers).double()
        if policy == "plain":
            for _ in range(3):
                for part in batch().tensor_split(4):
                    model(part).square().sum().backward()
        else:
            pipe = Pipe(model, [2, 2], 4, checkpoint=policy, schedule=schedule)
            for call in range(3):
                if call == 1:
                    model[2].fails = True
                    with pytest.raises(KeyError, match="private"):
                        pipe.step(batch(), loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
                    model[2].fails = False
                pipe.step(batch(), loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
        nexts = torch.tensor([drawn_from(own), drawn_from(other)])
        found.append([*[param.grad for param in model.parameters()], nexts])
    for numbers in found[1:]:
        for one, expected in zip(numbers, found[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    assert same(found[1], found[2]) and same(found[1], found[3])


def test_a_random_source_of_the_operating_system_has_no_state_to_put_back() -> None:
    """It is left alone; a layer that draws from it cannot be computed again, which the comparison says."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[1].source = random.SystemRandom()
    Pipe(model, [1, 1], 2, checkpoint="always")(torch.ones(4, 2)).sum().backward()


class PutsBack(nn.Module):
    """Times a number that is drawn, from a generator that is put back: no one sees from outside that it was."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        states = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng():
            x = x * (0.5 + SOURCES[self.source]())
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        return x


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_drawn_from_a_generator_that_is_put_back_is_by_the_rule_in_every_call(source, workers):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), PutsBack(source), PutsBack(source))
    pipe = Pipe(layers, [1, 2], chunks=2, devices=["cpu"] * 2, workers=workers)
    x, found = torch.randn(4, WIDTH), []
    for _ in range(7):  # calls 1, 2 and 4 look at more than others
        torch.manual_seed(3)
        found.append(pipe(x).detach())
    assert all(torch.equal(each, found[0]) for each in found)
