"""What are the derivatives of the plain module, computed chunk by chunk and differentiated by torch alone?

    x --tensor_split--> x_i --layers, each seeded by layer_seed--> out_i --cat--> out        all in one autograd graph
    g = grad(loss(out), targets, create_graph)     h = grad(mix(g), targets, create_graph)     third = grad(mix(h), ...)

law_reference.py cuts the graph at the joined output, as a Pipe does, to compare bit for bit; here nothing is cut, so
that any order of derivative can be taken, and sums over chunks may differ in the last bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from law_models import MODELS, Case
from law_reference import call_seed
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline import Pipe
from pipeline.recompute.randomness import layer_seed

MODES: dict[str, Any] = {
    "always": "always",
    "except_last": "except_last",
    "never": "never",
    "callable": lambda stage, chunk: (stage + chunk) % 2 == 0,
}
TWICE = [name for name, build in MODELS.items() if build().twice]
CREATES_CYCLE = "ignore:Using backward\\(\\) with create_graph=True:UserWarning"  # torch's, at each such call
Grads = list[Tensor | None]


class Plain(nn.Module):
    """The plain module as a Pipe of so many chunks has to compute it."""

    def __init__(self, model: nn.Sequential, chunks: int) -> None:
        super().__init__()
        self.model = model
        self.chunks = chunks

    def forward(self, x: Any) -> Any:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        pieces = _split(x, self.chunks)
        with torch.random.fork_rng(devices=()):
            return _join([self._one(piece, chunk, seed) for chunk, piece in enumerate(pieces)])

    def _one(self, value: Any, chunk: int, seed: int) -> Any:
        value = pytree.tree_map_only(Tensor, torch.clone, value)  # a layer may write its input
        for index, layer in enumerate(self.model):
            torch.default_generator.manual_seed(layer_seed(seed, chunk, index))
            value = layer(value)
        return value


def _split(x: Any, chunks: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(x)
    rows = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    count = min(chunks, rows)
    columns = [torch.tensor_split(leaf, count) if isinstance(leaf, Tensor) else (leaf,) * count for leaf in leaves]
    return [pytree.tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def _join(outs: Sequence[Any]) -> Any:
    flat = [pytree.tree_flatten(out) for out in outs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(joined, flat[0][1])


def balance(layers: int, stages: int) -> list[int]:
    """As even as can be; fewer stages where there are fewer layers."""
    stages = min(stages, layers)
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def pair(
    case: Callable[[], Case], stages: int, chunks: int, mode: str, train: bool = True
) -> list[tuple[Case, nn.Module]]:
    """The same case twice: in a Pipe, and plain."""
    piped, plain = case(), case()
    cuts = balance(len(piped.model), stages)
    pipe = Pipe(piped.model, cuts, chunks, checkpoint=MODES[mode], mixes_rows=not piped.rowwise)
    return [(piped, pipe.train(train)), (plain, Plain(plain.model, chunks).train(train))]


def leaves_of(x: Any) -> list[Tensor]:
    """The tensors of an input that can require a gradient, made to."""
    found = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.requires_grad_() for leaf in found]


def targets_of(case: Case, x: Any) -> list[Tensor]:
    """What to differentiate with respect to: inputs, parameters and captured leaves."""
    params = [param for param in case.model.parameters() if param.requires_grad]
    return [*leaves_of(x), *params, *case.extras]


def mix(grads: Sequence[Tensor | None]) -> Tensor:
    """One number of some gradients, curved in each of them."""
    found = [(place, grad) for place, grad in enumerate(grads, 1) if grad is not None]
    return torch.stack([(place * grad).sin().sum() + grad.square().sum() for place, grad in found]).sum()


def orders(loss: Tensor, targets: Sequence[Tensor], order: int) -> list[Grads]:
    """The first `order` derivatives, each of a number mixed from the one before; fewer, where torch itself has no more.

    From torch 2.14 on a batch norm in train mode has no third derivative.
    """
    found: list[Grads] = []
    for number in range(1, order + 1):
        try:
            grads = torch.autograd.grad(loss, targets, create_graph=number < order, allow_unused=True)
        except RuntimeError as error:
            if number < 3 or "does not support 3rd" not in str(error):
                raise
            break
        found.append(list(grads))
        if number < order:
            loss = mix(grads)
    return found


def flat_orders(loss: Tensor, targets: Sequence[Tensor], order: int = 2) -> Grads:
    """The same in one list."""
    return [grad for grads in orders(loss, targets, order) for grad in grads]


def derivatives(case: Case, net: nn.Module, rows: int, order: int, seed: int = 7) -> list[Grads]:
    """The derivatives of a case's loss with respect to everything, at this seed of torch."""
    x = case.make_input(rows)
    targets = targets_of(case, x)
    call_seed(seed)
    return orders(case.loss(net(x)), targets, order)


def assert_close(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], rtol: float = 1e-12) -> None:
    """Equal relative to the largest entry of all; no gradient where none is wanted."""
    assert [one is None for one in found] == [one is None for one in wanted]
    scale = max((float(one.detach().abs().max()) for one in wanted if one is not None), default=0.0)
    for one, other in zip(found, wanted, strict=True):
        if one is not None and other is not None:
            assert one.shape == other.shape
            assert float((one - other).detach().abs().max()) <= rtol * scale


def assert_same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """Equal bit for bit; no gradient where none is wanted."""
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
