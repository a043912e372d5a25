"""Models with skip connections, one for each thing that a skip may be or do. Cases as in law_models.py.

    x --> stash a --> .. --> stash b --> .. --> pop b --> .. --> pop a --> y

Where a tensor has more than two consumers its gradient may be summed in another order than in the plain module:
MANY_READERS names those.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from law_models import Case, fresh, normal
from torch import Tensor, nn
from torch.nn import functional

from pipeline.skip import Namespace, pop, skippable, stash

Commands = Generator[Any, Any, Any]


@skippable(stash=["a"])
class Stash(nn.Module):
    """Stashes what a function makes of its input; gives on what another makes of it."""

    def __init__(self, skip: Callable[[Any], Any] = lambda x: x, on: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.skip, self.on = skip, on

    def forward(self, x: Any) -> Commands:
        yield stash("a", self.skip(x))
        return self.on(x)


@skippable(pop=["a"])
class Pop(nn.Module):
    """Gives on what a function makes of its input and the skip."""

    def __init__(self, join: Callable[[Any, Any], Any] = lambda x, a: x + a) -> None:
        super().__init__()
        self.join = join

    def forward(self, x: Any) -> Commands:
        a = yield pop("a")
        return self.join(x, a)


@skippable(pop=["a"], stash=["b"])
class Relay(nn.Module):
    """Pops and stashes."""

    def forward(self, x: Tensor) -> Commands:
        a = yield pop("a")
        yield stash("b", a * x)
        return x - a


@skippable(pop=["b"])
class PopB(nn.Module):
    def forward(self, x: Tensor) -> Commands:
        b = yield pop("b")
        return x * b


def _case(*layers: nn.Module, shape: tuple[int, ...] = (4,), **what: Any) -> Case:
    return Case(nn.Sequential(*layers), lambda rows: normal(rows, *shape), **what)


def _mlp(stashing: nn.Module, popping: nn.Module, **what: Any) -> Case:
    """The skip goes past a dropout and a linear layer."""
    first = nn.Linear(4, 4), nn.Tanh()
    return _case(*first, stashing, nn.Dropout(0.3), nn.Linear(4, 4), nn.Sigmoid(), popping, nn.Linear(4, 3), **what)


def residual() -> Case:
    return _mlp(Stash(), Pop())


def next_door() -> Case:
    return _case(nn.Linear(4, 4), Stash(torch.tanh), Pop(torch.mul), nn.Linear(4, 2))


def input_itself() -> Case:
    """The first layer stashes what it was given, the last pops it."""
    return _case(Stash(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Pop(torch.mul))


def relay() -> Case:
    """One layer stashes and pops."""
    return _case(Stash(torch.sin), nn.Linear(4, 4), Relay(), nn.Tanh(), nn.Linear(4, 4), PopB(), nn.Linear(4, 2))


def namespaces() -> Case:
    """Three skips of one name: two that cross each other, around a third."""
    one, two, three = Namespace(), Namespace(), Namespace()
    return _case(
        Stash().isolate(one), nn.Linear(4, 4), Stash(torch.cos).isolate(two), nn.Tanh(),
        Stash(torch.sin).isolate(three), nn.Linear(4, 4), Pop(torch.mul).isolate(three), Pop().isolate(one),
        nn.Sigmoid(), Pop(torch.mul).isolate(two),
    )


def containers() -> Case:
    """A dict that holds tensors, one of them twice, a tuple, None, an int, a float, a str and an integer tensor."""

    def bag(x: Tensor) -> dict[str, Any]:
        h = x.sin()
        return {"h": h, "pair": (h, x.argmax(1)), "none": None, "times": 3, "scale": 0.5, "name": "tanh", "on": True}

    def join(x: Tensor, a: dict[str, Any]) -> Tensor:
        assert a["none"] is None and a["on"] is True and a["h"] is a["pair"][0]
        h, index = a["pair"]
        return getattr(torch, a["name"])(x) * a["scale"] + a["times"] * h * index[:, None]

    return _mlp(Stash(bag), Pop(join))


def plain_values() -> Case:
    """Skips with no tensor in them."""
    one, two = Namespace(), Namespace()
    return _case(
        Stash(lambda x: 3).isolate(one), nn.Linear(4, 4), Stash(lambda x: None).isolate(two), nn.Tanh(),
        Pop(lambda x, a: x * a).isolate(one), Pop(lambda x, a: x if a is None else x / 0).isolate(two),
    )


def differing() -> Case:
    """None for one chunk, a tensor for another: the data decide."""
    return _mlp(
        Stash(lambda x: x * 2 if x.sum() > 0 else None), Pop(lambda x, a: x if a is None else x + a), rowwise=False
    )


def no_gradient_arrives() -> Case:
    """Popped; the output does not depend on it."""
    return _mlp(Stash(torch.sin), Pop(lambda x, a: x + 0.1))


def needs_no_gradient() -> Case:
    return _mlp(Stash(lambda x: (x.detach(), x > 0)), Pop(lambda x, a: (x + a[0]) * a[1]))


def needs_none_beside_one_that_does() -> Case:
    return _mlp(Stash(lambda x: (x.detach(), x.sin())), Pop(lambda x, a: x * a[0] + a[1]))


def only_by_the_skip() -> Case:
    """What goes through the stages between is cut off: all gradients of the first layers come by the skip."""
    return _mlp(Stash(torch.sin, on=lambda x: x.detach()), Pop(torch.mul))


def only_to_the_stage_after() -> Case:
    """The layer that pops leaves what the stages between give it: they have no gradient, the first layers do."""
    return _mlp(Stash(torch.sin), Pop(lambda x, a: a + 0 * x.detach()))


def frozen_before() -> Case:
    case = _mlp(Stash(), Pop(torch.mul))
    case.model[0].requires_grad_(False)
    return case


def views() -> Case:
    """A skip that is a view of what goes on, transposed."""
    stashing, popping = Stash(lambda x: x[:, 1:3].t()), Pop(lambda x, a: x * a.t())
    return _case(nn.Linear(4, 4), stashing, nn.Tanh(), nn.Linear(4, 2), popping)


def nested() -> Case:
    """Skippable layers deep in layers; one pair within a layer."""
    space = Namespace()
    inner = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Sequential(nn.Tanh(), nn.Dropout(0.2), Pop(torch.mul)))
    return _case(
        nn.Sequential(nn.Linear(4, 4), Stash(torch.tanh).isolate(space)), inner, nn.Linear(4, 4),
        nn.Sequential(nn.Sequential(Pop().isolate(space)), nn.Linear(4, 2)),
    )


def inplace_after_a_clone() -> Case:
    """The stage after writes its input; the skip has memory of its own."""
    return _case(
        nn.Linear(4, 4), Stash(lambda x: x.clone()), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True),
        Pop(), nn.Linear(4, 2),
    )


def popped_and_written() -> Case:
    """The layer that pops writes into the skip."""
    return _case(nn.Linear(4, 4), Stash(torch.clone), nn.Linear(4, 4), Pop(lambda x, a: a.mul_(2) + x), nn.Tanh())


@skippable(stash=["a"])
class Shared(nn.Module):
    """Stashes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Commands:
        yield stash("a", self.linear.weight)
        return self.linear(x)


def stashed_weight() -> Case:
    return _case(Shared(), nn.Tanh(), nn.Linear(4, 4), Pop(lambda x, a: x @ a), nn.Tanh())


@skippable(stash=["a"])
class Statistics(nn.Module):
    """Stashes a buffer that the next chunk changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Commands:
        y = self.norm(x)
        assert self.norm.running_mean is not None
        yield stash("a", self.norm.running_mean)
        return y


def stashed_buffer() -> Case:
    popping = Pop(lambda x, a: x - a[:, None, None])
    layers = nn.Conv2d(2, 2, 1), Statistics(), nn.Conv2d(2, 2, 1), popping, nn.Flatten()
    return _case(*layers, shape=(2, 2, 2), stateful=True)


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def unet() -> Case:
    """Four levels: down by strided convolutions, up by transposed ones; each level's skip under one name."""
    spaces = [Namespace() for _ in range(4)]
    widths = [2, 3, 4, 5, 6]
    layers: list[nn.Module] = [_double(1, 2)]
    for level, space in enumerate(spaces):
        layers += [Stash().isolate(space), nn.Conv2d(widths[level], widths[level + 1], 2, stride=2), nn.ReLU()]
    layers.append(nn.Dropout2d(0.2))
    for level, space in reversed(list(enumerate(spaces))):
        layers += [
            nn.ConvTranspose2d(widths[level + 1], widths[level], 2, stride=2),
            Pop(lambda x, a: torch.cat([x, a], 1)).isolate(space),
            _double(2 * widths[level], widths[level]),
        ]
    return _case(*layers, nn.Conv2d(2, 1, 1), shape=(1, 16, 16), stateful=True)


def many_readers() -> Case:
    """A tensor with four consumers, in three stages."""
    one, two = Namespace(), Namespace()
    return _case(
        nn.Linear(4, 4), Stash(on=lambda x: x).isolate(one), Stash(on=torch.tanh).isolate(two), nn.Linear(4, 4),
        Pop(lambda x, a: x * a + a.sin()).isolate(two), nn.Linear(4, 4), Pop(lambda x, a: x + a.cos() * a).isolate(one),
    )


def linear_pop() -> Case:
    """functional.linear between what the skip and what the stages give."""
    return _mlp(Stash(lambda x: x.softmax(1)), Pop(lambda x, a: functional.gelu(x) @ a.mean(0).diag()), rowwise=False)


_BUILDERS = (
    residual,
    next_door,
    input_itself,
    relay,
    namespaces,
    containers,
    plain_values,
    differing,
    no_gradient_arrives,
    needs_no_gradient,
    needs_none_beside_one_that_does,
    only_by_the_skip,
    only_to_the_stage_after,
    frozen_before,
    views,
    nested,
    inplace_after_a_clone,
    popped_and_written,
    stashed_weight,
    stashed_buffer,
    unet,
    many_readers,
    linear_pop,
)

SKIPS: dict[str, Callable[[], Case]] = {build.__name__: fresh(build) for build in _BUILDERS}
MANY_READERS = ("many_readers",)
