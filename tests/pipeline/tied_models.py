"""Models in which a parameter stands in several layers: made(kind), and what goes into one, input_of(kind, rows)."""

from collections.abc import Callable
from typing import Any

import torch
from law_models import normal
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class With(nn.Module):
    """A function of itself and x as a layer, with parameters and layers under names."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def table() -> nn.Embedding:
    return nn.Embedding(9, 4, dtype=torch.float64)


def head(weight: nn.Parameter) -> With:
    """From features to a number for each token of the table that they came from."""
    return With(lambda self, x: x @ self.weight.t(), weight=weight)


def symmetric(layer: nn.Linear) -> nn.Linear:
    return parametrize.register_parametrization(layer, "weight", With(lambda self, w: w.triu() + w.triu(1).t()))


# ------------------------------------------------------------------------------------------------- kinds of tying


def embedding_and_head() -> nn.Sequential:
    tokens = table()
    norm = nn.LayerNorm(4, dtype=torch.float64)
    return nn.Sequential(tokens, linear(), nn.Tanh(), nn.Dropout(0.3), norm, head(tokens.weight))


def layer_three_times() -> nn.Sequential:
    block = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.2))
    return nn.Sequential(block, linear(), block, nn.Tanh(), block)


def in_other_containers() -> nn.Sequential:
    shared = linear()
    listed = With(lambda self, x: self.own[1](self.own[0](x)).sin(), own=nn.ModuleList([linear(), shared]))
    named = With(lambda self, x: self.own["a"](x) * 2, own=nn.ModuleDict({"a": shared}))
    return nn.Sequential(nn.Sequential(nn.Tanh(), nn.Sequential(shared)), listed, named)


def frozen() -> nn.Sequential:
    shared = linear()
    shared.weight.requires_grad_(False)
    return nn.Sequential(linear(), shared, nn.Tanh(), shared, linear())


def unused_at_first() -> nn.Sequential:
    shared = linear()
    return nn.Sequential(With(lambda self, x: x.sin(), own=shared), nn.Sequential(shared, nn.Tanh()), shared)


def unused_at_last() -> nn.Sequential:
    shared = linear()
    return nn.Sequential(shared, nn.Tanh(), shared, With(lambda self, x: x.sin(), own=shared))


def in_some_chunks() -> nn.Sequential:
    """The later reader computes with it only where the first entry of a chunk is positive."""
    shared = linear()
    sometimes = With(lambda self, x: self.own(x) if bool(x.detach()[0, 0] > 0) else x.cos(), own=shared)
    return nn.Sequential(shared, nn.Tanh(), sometimes, linear(), sometimes)


def transposed() -> nn.Sequential:
    into, code = linear(4, 6), linear(6, 3)
    back = With(lambda self, x: x @ self.code @ self.into, into=into.weight, code=code.weight)
    return nn.Sequential(into, nn.Tanh(), code, nn.Sigmoid(), back)


def in_other_strides() -> nn.Sequential:
    """A parameter whose memory is not in the order of its shape."""
    one, other = linear(), linear()
    one.weight = other.weight = nn.Parameter(normal(4, 4, seed=3).t())
    return nn.Sequential(one, nn.Tanh(), other, nn.Tanh(), one)


def parametrized() -> nn.Sequential:
    shared = symmetric(linear())
    return nn.Sequential(shared, nn.Tanh(), shared, linear())


def tied_originals() -> nn.Sequential:
    one, other = symmetric(linear()), symmetric(linear())
    other.parametrizations.weight.original = one.parametrizations.weight.original
    return nn.Sequential(one, nn.Tanh(), other)


def weight_norm() -> nn.Sequential:
    shared = parametrizations.weight_norm(linear())
    return nn.Sequential(shared, nn.Tanh(), shared, linear())


def recurrent() -> nn.Sequential:
    """torch's recurrent layers hold their parameters in a list, too, and compute with that."""
    gru = nn.GRU(4, 4, batch_first=True, dtype=torch.float64)
    take = With(lambda self, x: self.gru(x.unsqueeze(1))[0].squeeze(1), gru=gru)
    return nn.Sequential(take, linear(), take)


KINDS: dict[str, Callable[[], nn.Sequential]] = {
    build.__name__: build
    for build in (
        embedding_and_head, layer_three_times, in_other_containers, frozen, unused_at_first, unused_at_last,
        in_some_chunks, transposed, in_other_strides, parametrized, tied_originals, weight_norm, recurrent
    )
}


def made(kind: str) -> nn.Sequential:
    """The same model each time."""
    torch.manual_seed(0)
    return KINDS[kind]()


def input_of(kind: str, rows: int) -> Tensor:
    return torch.arange(rows * 3).view(rows, 3) % 9 if kind == "embedding_and_head" else normal(rows, 4)
