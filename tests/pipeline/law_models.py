"""Which models must a Pipe leave as they are? One small float64 case for each thing that a layer may do.

    case = MODELS["convnet"]()      a fresh model, the same numbers each time
    x = case.make_input(7)          seven rows, always the same
    case.loss(case.model(x))        one number: a non-linear sum over rows

Models are built anew rather than deep-copied, since what a closure holds a deep copy would share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from pipeline.skip import pop, skippable, stash


def per_row(output: Any) -> Tensor:
    """A non-linear number for each row: what the losses add up. Tensors without a gradient count too, as constants."""
    total: Any = 0.0
    for place, leaf in enumerate(pytree.tree_leaves(output), 1):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            flat = real.flatten(1) if real.dim() > 1 else real[:, None]
            total = total + (place * flat).sin().mul(flat).sum(1) + 0.5 * flat.square().sum(1)
    return total


def sum_loss(output: Any) -> Tensor:
    return per_row(output).sum()


@dataclass(frozen=True, eq=False)
class Case:
    """A model, and how to feed and judge it.

    Attributes:
        model: in train mode.
        make_input: rows -> the input, in which no tensor requires grad.
        loss: joined output -> a sum over rows.
        twice: whether it has a second derivative everywhere that torch itself can compute.
        stateful: whether a forward in train mode changes something that outlives it (a buffer, a generator).
        rowwise: whether in eval mode the output of a row depends on that row alone, so that chunks cannot be told.
        extras: leaves that the model computes with and that are registered nowhere.
    """

    model: nn.Sequential
    make_input: Callable[[int], Any]
    loss: Callable[[Any], Tensor] = sum_loss
    twice: bool = True
    stateful: bool = False
    rowwise: bool = True
    extras: tuple[Tensor, ...] = ()


def _case(
    *layers: nn.Module, shape: tuple[int, ...] = (4,), make_input: Callable[[int], Any] | None = None, **what: Any
) -> Case:
    return Case(nn.Sequential(*layers), make_input or (lambda rows: normal(rows, *shape)), **what)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


# ------------------------------------------------------------------------------------------------------- the models


def mlp() -> Case:
    return _case(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.3), nn.Sigmoid(), nn.Linear(6, 2))


def convnet() -> Case:
    return _case(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Conv2d(3, 2, 3),
        nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3)),
        shape=(2, 4, 4),
        stateful=True,
    )


class Attention(nn.Module):
    """Written out, so that every kernel has a second derivative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = self.dropout((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1))
        return self.out(weights @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width)
        wide, narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(wide, nn.GELU(), nn.Dropout(0.2), narrow)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def transformer() -> Case:
    return _case(nn.Linear(4, 6), Block(6), Block(6), nn.LayerNorm(6), shape=(3, 4))


def encoder_layers() -> Case:
    layers = [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True) for _ in range(3)]
    return _case(*layers, shape=(3, 4), twice=False)  # flash attention has no second derivative


def spectral() -> Case:
    one, other = spectral_norm(nn.Linear(4, 5)), spectral_norm(nn.Linear(5, 4))
    return _case(one, nn.Tanh(), other, nn.Tanh(), nn.Linear(4, 2), stateful=True)


class ToDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        plain = {"none": None, "scale": 2, "name": "tanh", "flag": True}
        return {"h": h, "skip": (x, h), "index": torch.arange(len(x)), **plain}


class DictToTuple(nn.Module):
    """Reads non-tensors; uses one tensor that arrives at two places, through both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: dict[str, Any]) -> tuple[Any, ...]:
        assert value["none"] is None and value["flag"] is True
        x, h = value["skip"]
        order = value["index"].flip(0)  # an integer tensor that is used
        h = getattr(torch, value["name"])(self.linear(h) + value["h"])
        return h * value["scale"], [x, order], 0.5, None


class TupleToTuple(nn.Module):
    def forward(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        h, (x, order), scale, nothing = value
        return h * scale + x, {"order": order, "none": nothing}


class TupleToTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, value: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        h, rest = value
        return self.linear(h), h[rest["order"]]


def exchange() -> Case:
    """Stages that exchange dicts, tuples, lists, None, integers, floats, strings, and integer tensors.

    Not row-wise: a chunk's rows are turned round within the chunk.
    """
    return _case(ToDict(), DictToTuple(), TupleToTuple(), TupleToTensor(), rowwise=False)


def frozen() -> Case:
    """At the front, so that the first stages keep nothing, and in the middle, where gradients pass through."""
    middle = nn.Linear(5, 5), nn.Dropout(0.2), nn.Linear(5, 5)
    case = _case(nn.Linear(4, 5), nn.Tanh(), *middle, nn.Tanh(), nn.Linear(5, 2))
    for index in (0, 4):
        case.model[index].requires_grad_(False)
    case.model[6].bias.requires_grad_(False)
    return case


def no_parameters() -> Case:
    return _case(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.4), nn.Softplus(), nn.Linear(4, 2))


def inplace_first() -> Case:
    return _case(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def inplace_middle() -> Case:
    return _case(
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Dropout(0.3, inplace=True),
        Apply(lambda x: x.mul_(2.0)),
        nn.Linear(4, 2),
    )


class Experts(nn.Module):
    """Which expert computes depends on the data, so some chunks leave a parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if x.mean() > 0 else self.negative(x)


def experts() -> Case:
    return _case(nn.Linear(4, 4), nn.Tanh(), Experts(), nn.Linear(4, 2), rowwise=False)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def never_used() -> Case:
    return _case(Unused(), nn.Tanh(), Unused(), nn.Linear(4, 2))


class Captured(nn.Module):
    """The parameter is registered, and used through a list, where no swap of `_parameters` can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(normal(4, 4, seed=3) / 2)
        self.ps = [self.w]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.ps[0]


def captured() -> Case:
    return _case(nn.Linear(4, 4), Captured(), nn.Tanh(), Captured(), nn.Linear(4, 2))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def _checkpointed(use_reentrant: bool, twice: bool) -> Case:
    inner = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
    wrapped = [Checkpointed(each, use_reentrant) for each in inner]
    return _case(nn.Linear(4, 4), wrapped[0], nn.Tanh(), wrapped[1], nn.Linear(4, 2), twice=twice)


def checkpoint_reentrant() -> Case:
    return _checkpointed(True, twice=False)  # torch's own limit: "not compatible with torch.autograd.grad"


def checkpoint_nonreentrant() -> Case:
    return _checkpointed(False, twice=True)


def returns_input() -> Case:
    same = Apply(lambda x: x)
    return _case(nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Tanh(), same, nn.Linear(4, 2), nn.Identity())


class MixedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {"h": h, "best": h.argmax(-1), "detached": h.detach() * 2, "x": x, "count": 3, "none": None}


def mixed_outputs() -> Case:
    """Outputs some of which need no gradient."""
    return _case(nn.Linear(4, 4), nn.Tanh(), MixedOutputs())


def gaps() -> Case:
    """Between stages there are tensors with gaps in memory, expanded ones, and ones that begin anywhere in memory."""

    def part(x: Tensor) -> Tensor:
        return torch.cat([x, x.sin()], 1)[:, 3:20]

    def rest(x: Tensor) -> Tensor:
        return torch.cat([x[:1, :2].flatten(), x.flatten()])[2:].view_as(x)

    def spread(x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, 5)

    return _case(
        nn.Linear(4, 17), Apply(part), nn.Linear(17, 17), Apply(rest), nn.Linear(17, 5),
        Apply(lambda x: x.t().contiguous().t()), nn.Linear(5, 5), Apply(spread), nn.Linear(5, 2),
    )  # fmt: skip


class Shares(nn.Module):
    """Autograd gives one memory to the gradients of several parameters, and, with chunks of one row, of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w, self.row = (nn.Parameter(normal(4, seed=seed)) for seed in (6, 7, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + torch.stack([self.u, self.w]).sum(0) + self.row.view(1, 4)


def one_memory() -> Case:
    return _case(nn.Linear(4, 4), Shares(), nn.Linear(4, 4), Shares(), nn.Linear(4, 2))


def embedding() -> Case:
    def make_input(rows: int) -> Tensor:
        return torch.randint(0, 7, (rows, 3), generator=torch.Generator().manual_seed(5))

    layers = nn.Embedding(7, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    return _case(*layers, make_input=make_input)


class PrivateNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(11)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def private_generator() -> Case:
    return _case(nn.Linear(4, 4), PrivateNoise(), nn.Tanh(), PrivateNoise(), nn.Linear(4, 2), stateful=True)


def closure() -> Case:
    """A leaf that no module knows."""
    w = normal(4, 4, seed=4).div_(2).requires_grad_()
    return _case(nn.Linear(4, 4), Apply(lambda x: x @ w), nn.Tanh(), nn.Linear(4, 2), extras=(w,))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(x)))


def reused() -> Case:
    """One layer used twice inside a stage: its two gradients are one."""
    return _case(nn.Linear(4, 4), Twice(), nn.Dropout(0.2), Twice(), nn.Linear(4, 2))


def dict_input() -> Case:
    """The input is a pytree, with a plain value and an integer tensor in it."""

    def make_input(rows: int) -> dict[str, Any]:
        return {"x": normal(rows, 4), "pair": (normal(rows, 4, seed=2), 3), "index": torch.arange(rows)}

    def mix(value: dict[str, Any]) -> Tensor:
        other, scale = value["pair"]
        return value["x"] * other * scale + value["index"][:, None].to(other)

    return _case(Apply(mix), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), make_input=make_input)


@skippable(stash=["wide", "deep"])
class Down(nn.Module):
    """Stashes its input, and what it makes together with plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        yield stash("wide", x)
        deep = torch.tanh(self.layer(x))
        yield stash("deep", {"value": deep, "scale": 2, "none": None})
        return deep


@skippable(pop=["deep"], stash=["flat"])
class Middle(nn.Module):
    """Pops one skip and stashes another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        deep = yield pop("deep")
        yield stash("flat", x.detach())
        return self.layer(x) + deep["value"] * deep["scale"]


@skippable(pop=["wide", "flat"])
class Up(nn.Module):
    """Pops what was stashed far away."""

    def forward(self, x: Tensor) -> Any:
        wide = yield pop("wide")
        flat = yield pop("flat")
        return x * flat + wide


def skips() -> Case:
    """Skips over one stage, over several, within one; one that needs no gradient."""
    return _case(Down(), nn.Dropout(0.2), Middle(), nn.Tanh(), Up(), nn.Linear(4, 2))


def sparse_between() -> Case:
    """A sparse tensor goes from layer to layer. Torch has no second derivative of to_dense."""
    to_sparse, to_dense = Apply(torch.Tensor.to_sparse), Apply(torch.Tensor.to_dense)
    return _case(nn.Linear(4, 4), nn.ReLU(), to_sparse, to_dense, nn.Dropout(0.2), nn.Linear(4, 2), twice=False)


_BUILDERS = (
    mlp,
    convnet,
    transformer,
    encoder_layers,
    spectral,
    exchange,
    frozen,
    no_parameters,
    inplace_first,
    inplace_middle,
    experts,
    never_used,
    captured,
    checkpoint_reentrant,
    checkpoint_nonreentrant,
    returns_input,
    mixed_outputs,
    gaps,
    one_memory,
    embedding,
    private_generator,
    closure,
    reused,
    dict_input,
    skips,
    sparse_between,
)


def fresh(build: Callable[[], Case]) -> Callable[[], Case]:
    """Build a case anew each time, always with the same weights."""

    def built() -> Case:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(20)
            case = build()
        case.model.double()
        return case

    return built


MODELS: dict[str, Callable[[], Case]] = {build.__name__: fresh(build) for build in _BUILDERS}
