"""What would the plain module compute, chunk by chunk? The numbers that a Pipe has to give, bit for bit.

    x --tensor_split--> x_i --layers, each seeded by layer_seed--> out_i --cat--> out (a leaf) --loss--> g = dloss/dout
    out_i.backward(g_i), i ascending, into empty `.grad`, of float32 for halves     reference(...): as by `pipe(x)`
    part_i = loss_fn(out_i, target_i) * weight;  part_i.backward(), i ascending     reference_step(...): pipe.step

Each chunk's gradients are added here: autograd adds in place, to memory that another parameter may have too. Nothing is
imported from pipeline but `layer_seed`, the public rule for random numbers.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline.recompute.randomness import layer_seed


@dataclass(frozen=True, eq=False)
class Result:
    """What a call and its backward leave behind.

    Attributes:
        outputs: the joined output pytree, detached.
        loss: a number; None: no loss was asked for.
        input_grads: for each tensor of x in pytree order; None where there is none.
        grads: for each parameter, by name.
        buffers: by name.
        extra_grads: for each of `extras`.
    """

    outputs: Any
    loss: Tensor | None
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    extra_grads: list[Tensor | None]


class Whole:
    """Marks a tensor of x that goes to every chunk uncut (pipeline.NoChunk, which is not imported here)."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def call_seed(manual_seed: int) -> int:
    """The number that a call draws after `torch.manual_seed(manual_seed)`. Leaves the generator at that seed."""
    torch.manual_seed(manual_seed)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    torch.manual_seed(manual_seed)
    return seed


def reference(
    model: nn.Sequential, x: Any, chunks: int, seed: int, loss: Callable[[Any], Tensor], extras: Sequence[Tensor] = ()
) -> Result:
    """The forward entry point: a loss of the joined output. Writes the model's `.grad` and buffers, never x."""
    sum_in_float32([*model.parameters(), *extras])
    parts = _Parts(x, chunks)
    with generators_kept():
        outs = [_forward(model, parts.given(chunk), chunk, seed) for chunk in range(parts.count)]
        joined = join(outs)
        value = loss(joined)
        tensors = [leaf for leaf in pytree.tree_leaves(joined) if isinstance(leaf, Tensor)]
        wanted = list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())
        grads = torch.autograd.grad(value, wanted, allow_unused=True) if value.requires_grad else [None] * len(wanted)
        offsets = [0] * len(wanted)
        for out in outs:
            leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
            piece_of = {id(tensor): piece for tensor, piece in zip(tensors, leaves, strict=True)}
            roots, root_grads = [], []
            for place, (tensor, grad) in enumerate(zip(wanted, grads, strict=True)):
                piece = piece_of[id(tensor)]
                if grad is not None and piece.requires_grad:
                    roots.append(piece)
                    root_grads.append(grad[offsets[place] : offsets[place] + len(piece)])
                offsets[place] += len(piece)
            if roots:
                with adding([*model.parameters(), *extras]):
                    torch.autograd.backward(roots, root_grads)
    return _result(model, joined, value, parts, extras)


def reference_step(
    model: nn.Sequential,
    x: Any,
    target: Any,
    chunks: int,
    seed: int,
    loss_fn: Callable[[Any, Any], Tensor],
    reduction: str = "mean",
    extras: Sequence[Tensor] = (),
) -> Result:
    """`pipe.step`: each chunk's weighted loss, backward ascending. The loss draws random numbers as one more layer."""
    sum_in_float32([*model.parameters(), *extras])
    parts = _Parts(x, chunks)
    targets = torch.tensor_split(target, parts.count) if isinstance(target, Tensor) else [target] * parts.count
    total: Any = None
    with generators_kept():
        outs = [_forward(model, parts.given(chunk), chunk, seed) for chunk in range(parts.count)]
        for chunk, out in enumerate(outs):
            seed_all(layer_seed(seed, chunk, len(model)))
            part = loss_fn(out, targets[chunk])
            part = part * (parts.rows[chunk] / sum(parts.rows)) if reduction == "mean" else part
            if part.requires_grad:
                with adding([*model.parameters(), *extras]):
                    part.backward()
            total = part.detach() if total is None else total + part.detach()
    return _result(model, join(outs), total, parts, extras)


def seed_all(number: int) -> None:
    """Seed the default generators of torch, Python and numpy."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Within: the default generators may be used; afterwards they are as before."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


@contextmanager
def adding(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Within: a backward runs. Its gradients are added to those that there are, in new tensors."""
    before = {leaf: leaf.grad for leaf in leaves}
    for leaf in before:
        leaf.grad = None
    yield
    for leaf, earlier in before.items():
        if leaf.grad is None:
            leaf.grad = earlier
        else:
            leaf.grad = leaf.grad.clone() if earlier is None else earlier + leaf.grad


def sum_in_float32(leaves: Iterable[Tensor]) -> None:
    """Sums of half precision are rounded once, at their end, not at every chunk."""
    for leaf in leaves:
        if leaf.dtype in (torch.float16, torch.bfloat16):
            leaf.grad_dtype = torch.float32


def forward_only(model: nn.Sequential, x: Any, chunks: int, seed: int) -> Any:
    """The joined output, in the mode and the grad mode that are found."""
    parts = _Parts(x, chunks)
    with generators_kept():
        return join([_forward(model, parts.given(chunk), chunk, seed) for chunk in range(parts.count)])


def _forward(model: nn.Sequential, value: Any, chunk: int, seed: int) -> Any:
    for index, layer in enumerate(model):
        seed_all(layer_seed(seed, chunk, index))
        value = layer(value)
    return value


def join(outs: Sequence[Any]) -> Any:
    """The outputs of the chunks along dim 0: tensors as new leaves, anything else as chunk 0 has it."""
    flat = [pytree.tree_flatten(out) for out in outs]
    joined: dict[tuple[int, ...], Tensor] = {}  # a tensor that stands at two places stays one, as in the plain module
    leaves = []
    for column in zip(*(each for each, _ in flat), strict=True):
        if isinstance(column[0], Tensor):
            key = tuple(id(piece) for piece in column)
            if key not in joined:
                whole = torch.cat([piece.detach() for piece in column])
                joined[key] = whole.requires_grad_(any(piece.requires_grad for piece in column))
            leaves.append(joined[key])
        else:
            leaves.append(column[0])
    return pytree.tree_unflatten(leaves, flat[0][1])


class _Parts:
    """x in pieces, each a leaf of its own; the model gets copies of them, which it may write."""

    def __init__(self, x: Any, chunks: int) -> None:
        leaves, self._spec = pytree.tree_flatten(x, is_leaf=lambda leaf: isinstance(leaf, Whole))
        self._leaves = [leaf.value if isinstance(leaf, Whole) else leaf for leaf in leaves]
        self._whole = [isinstance(leaf, Whole) for leaf in leaves]
        lengths = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self.count = min(chunks, lengths[0])
        self.rows = [len(piece) for piece in torch.tensor_split(torch.empty(lengths[0]), self.count)]
        self._own: dict[int, list[Tensor]] = {}  # by id of a tensor of x, which may stand there twice
        for leaf, whole in zip(self._leaves, self._whole, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in self._own:
                pieces = [leaf] * self.count if whole else torch.tensor_split(leaf, self.count)
                self._own[id(leaf)] = [piece.detach().clone().requires_grad_(leaf.requires_grad) for piece in pieces]

    def given(self, chunk: int) -> Any:
        copies = {key: pieces[chunk].clone() for key, pieces in self._own.items()}
        leaves = [copies[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def grads(self) -> list[Tensor | None]:
        return [
            self._joined(self._own[id(leaf)], whole)
            for leaf, whole in zip(self._leaves, self._whole, strict=True)
            if isinstance(leaf, Tensor)
        ]

    @staticmethod
    def _joined(pieces: Sequence[Tensor], whole: bool) -> Tensor | None:
        found = [piece.grad for piece in pieces if piece.grad is not None]
        if not found:
            return None
        if whole:
            return sum(found[1:], found[0])
        return torch.cat([torch.zeros_like(piece) if piece.grad is None else piece.grad for piece in pieces])


def _result(model: nn.Sequential, joined: Any, loss: Tensor | None, parts: _Parts, extras: Sequence[Tensor]) -> Result:
    return Result(
        outputs=pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), joined),
        loss=None if loss is None else loss.detach(),
        input_grads=parts.grads(),
        grads={
            name: None if param.grad is None else param.grad.to(param.dtype) for name, param in model.named_parameters()
        },
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        extra_grads=[None if leaf.grad is None else leaf.grad.to(leaf.dtype) for leaf in extras],
    )
