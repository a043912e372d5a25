"""What are the curvature products of the plain module? Whole-graph double backward, chunk by chunk as a Pipe computes.

    x --tensor_split--> x_i --layers, each seeded by layer_seed--> out_i --cat--> out --loss--> L       one graph
    H V = d<dL/dw, V>/dw            J V = d<J^T u, V>/du            G V = J^T (d2L/dy2) (J V)
    F V = (1/c) sum_n g_n g_n^T V   with g_n = dL_n/dw, one backward for each row

Nothing is imported from pipeline but `layer_seed`, the public rule for random numbers. V = identity gives the matrices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline.recompute.randomness import layer_seed

NAMES = ("Hessian", "GaussNewton", "EmpiricalFisher")


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss in the three forms that a test needs.

    Attributes:
        whole: what is given to the operator as loss_fn.
        each: (output, target) -> the loss of each row of the output, as a vector.
        kind: what `whole` is: "mean" or "sum" over rows, or "count": it returns (sum, count).
    """

    whole: Callable[[Any, Any], Any]
    each: Callable[[Any, Any], Tensor]
    kind: str = "mean"


@dataclass(frozen=True, eq=False)
class Truth:
    """Products [n, k] by the names of the operators' classes; the gradient [n] and the loss."""

    products: dict[str, Tensor]
    gradient: Tensor
    loss: float


@dataclass(frozen=True, eq=False)
class _Batch:
    """A mini-batch's forward: its output tree, target, and how many rows went in."""

    output: Any
    target: Any
    rows: int


def truth(
    model: nn.Sequential,
    data: Sequence[tuple[Any, Any]],
    loss: Loss,
    vectors: Tensor | None = None,
    *,
    chunks: int = 1,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> Truth:
    """The products of the model in the mode in which it is, with columns [n, k]; None: with the identity.

    Buffers and generators of the model are changed: give a model of its own.
    """
    chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad and (names is None or name in names)]
    params = [parameter for _, parameter in chosen]
    if vectors is None:
        vectors = torch.eye(sum(parameter.numel() for parameter in params), dtype=params[0].dtype)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batches = []
    for number, (x, target) in enumerate(data):
        for name, buffer in buffers.items():  # anew for each mini-batch; what a graph has saved stays as it is
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = buffer.clone()
        output, rows = forward(model, x, chunks, seed + number)
        batches.append(_Batch(output, target, rows))
    value = _total(batches, loss)
    gradient = _flat(_grads(value, params, True), params)
    columns = vectors.unbind(1)
    products = {
        "Hessian": [_of(gradient, params, column) for column in columns],
        "GaussNewton": [_gauss_newton(batches, loss, params, column) for column in columns],
    }
    found = {name: torch.stack(each, 1) for name, each in products.items()}
    rows_ = torch.stack([_flat(_grads(row, params, False), params) for row in _rows(batches, loss)])
    found["EmpiricalFisher"] = rows_.T @ (rows_ @ vectors) / _divisor(batches, loss)
    return Truth(found, gradient.detach(), float(value.detach()))


def forward(model: nn.Sequential, x: Any, chunks: int, seed: int) -> tuple[Any, int]:
    """The joined output, in one graph, and the rows of x."""
    own = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Generator)]
    for number, generator in enumerate(dict.fromkeys(own)):
        generator.manual_seed(seed + number)
    leaves, spec = pytree.tree_flatten(x)
    rows = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    count = min(chunks, rows)
    outs = []
    with torch.random.fork_rng(devices=()):
        for chunk in range(count):
            cut = [leaf.tensor_split(count)[chunk].clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            value = pytree.tree_unflatten(cut, spec)
            for index, layer in enumerate(model):
                number = layer_seed(seed, chunk, index)
                torch.default_generator.manual_seed(number)
                random.seed(number)
                numpy.random.seed(number & 0xFFFFFFFF)
                value = layer(value)
            outs.append(value)
    flat = [pytree.tree_flatten(out) for out in outs]
    columns = zip(*(each for each, _ in flat), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return pytree.tree_unflatten(joined, flat[0][1]), rows


def _total(batches: Sequence[_Batch], loss: Loss) -> Tensor:
    """The loss over all data."""
    found = [loss.whole(batch.output, batch.target) for batch in batches]
    if loss.kind == "count":
        return torch.stack([value for value, _ in found]).sum() / float(sum(count for _, count in found))
    weights = [batch.rows if loss.kind == "mean" else 1 for batch in batches]
    parts = [value * weight for value, weight in zip(found, weights, strict=True)]
    return torch.stack(parts).sum() / (sum(weights) if loss.kind == "mean" else 1)


def _divisor(batches: Sequence[_Batch], loss: Loss) -> float:
    if loss.kind == "count":
        return float(sum(loss.whole(batch.output, batch.target)[1] for batch in batches))
    return float(sum(len(loss.each(batch.output, batch.target)) for batch in batches)) if loss.kind == "mean" else 1.0


def _rows(batches: Sequence[_Batch], loss: Loss) -> list[Tensor]:
    return [row for batch in batches for row in loss.each(batch.output, batch.target)]


def _gauss_newton(batches: Sequence[_Batch], loss: Loss, params: Sequence[Tensor], column: Tensor) -> Tensor:
    """Each mini-batch's output y: J v by the adjoint of the adjoint, then d2L/dy2 of it, then J^T of that."""
    outputs = [_live(batch.output) for batch in batches]
    cut = [[leaf.detach().requires_grad_() for leaf in leaves] for leaves in outputs]
    again = [
        _Batch(_replaced(batch.output, leaves), batch.target, batch.rows)
        for batch, leaves in zip(batches, cut, strict=True)
    ]
    flat_cut = [leaf for leaves in cut for leaf in leaves]
    flat_out = [leaf for leaves in outputs for leaf in leaves]
    grads = _grads(_total(again, loss), flat_cut, True)
    seeds = [torch.zeros_like(leaf, requires_grad=True) for leaf in flat_out]
    pulled = torch.autograd.grad(flat_out, params, seeds, create_graph=True, allow_unused=True)
    tangents = _grads(_dot(_flat(pulled, params), column), seeds, False)
    pairs = zip(grads, tangents, strict=True)
    bent = sum(((grad * tangent).sum() for grad, tangent in pairs if grad is not None and tangent is not None))
    if not isinstance(bent, Tensor) or not bent.requires_grad:
        return torch.zeros_like(column)
    cotangents = _grads(bent, flat_cut, False)
    live = [(out, each) for out, each in zip(flat_out, cotangents, strict=True) if each is not None]
    outs, along = [out for out, _ in live], [each for _, each in live]
    return _flat(torch.autograd.grad(outs, params, along, retain_graph=True, allow_unused=True), params)


def _live(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _replaced(output: Any, leaves: Sequence[Tensor]) -> Any:
    """The output with its tensors that require a gradient replaced, in their order."""
    own, spec = pytree.tree_flatten(output)
    new = iter(leaves)
    made = [next(new) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in own]
    return pytree.tree_unflatten(made, spec)


def _grads(value: Tensor, targets: Sequence[Tensor], create_graph: bool) -> tuple[Tensor | None, ...]:
    if not value.requires_grad:
        return (None,) * len(targets)
    return torch.autograd.grad(value, targets, create_graph=create_graph, retain_graph=True, allow_unused=True)


def _flat(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    pairs = zip(grads, params, strict=True)
    return torch.cat([torch.zeros_like(p).flatten() if grad is None else grad.flatten() for grad, p in pairs])


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum()


def _of(gradient: Tensor, params: Sequence[Tensor], column: Tensor) -> Tensor:
    """The second derivative along a column."""
    return _flat(_grads(_dot(gradient, column), params, False), params)
