"""The backward of a graph in two halves: I, the gradient of its input, and W, those of its weights.

    y = x @ w.t()         AddmmBackward0 --> x          I  autograd goes through the graph as in B, but is not asked for
           ^                    |                          the gradient of w [1]; x and that of y are kept [2]
    gradient of y          TBackward0                   W  (gradient of y).t() @ x, by the kernel that autograd would
                                |                          have called [3]; autograd goes on from there, through
                         AccumulateGrad(w)                 TBackward0 to w.grad [4]: the same bits and hooks as in B

This covers matrix products (nn.Linear, attention's projections), convolutions and embeddings, which hold nearly all
weights, whatever module calls them. All other gradients (biases, norms, a weight that is also used in another way, a
product whose node in the graph has a hook, which would miss the gradient of w, or whose x hooks have packed, as those
of torch.utils.checkpoint, which recompute a region each time that they are asked) are computed in I. From I to W these
are held: x, the gradient of y, and the graph below [4], which saves nothing.

A stage splits its chunks so (pipeline/stage/split_backward.py), and a profile its layers, to time and count the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from partition.contents import version_of
from partition.graph import node_of

REENTRANT = "CheckpointFunctionBackward"  # a node of torch.utils.checkpoint(use_reentrant=True): it only writes `.grad`
WeightGradFunction: TypeAlias = "partial[Sequence[Tensor]]"  # from the gradient of an output to those of the weights


class Site(NamedTuple):
    """A use of weights in a graph.

    Attributes:
        node: the product.
        weights: those whose gradients can wait.
        tails: the edges of the graph from the product to each of them.
        saved_input: the input.
        late: maps the gradient of the output to those that the product gives to its tails.
    """

    node: Any
    weights: Sequence[Tensor]
    tails: Sequence[GradientEdge]
    saved_input: Tensor
    late: WeightGradFunction


class _WeightRule(NamedTuple):
    """The inputs of a node that are weights, and a map from the node to their gradients.

    A convolution's weight and bias are computed by one kernel, so the bias waits too. The bias of a matrix
    product is a plain sum and does not wait.
    """

    places: tuple[int, ...]
    saved: str  # the attribute in which the node has saved its input, as it was packed
    late: Callable[[Any, bool], tuple[Tensor, WeightGradFunction] | None]


class LateGrads(NamedTuple):
    """Gradients that W will compute, and the tensors that must not change until then.

    `site` is without its node: the graph above is freed in I.
    """

    site: Site
    grad: Tensor  # of the output
    versions: tuple[int, int]  # of the input and of the gradient

    def was_written(self) -> bool:
        """Whether the input or the gradient was written since I."""
        return (version_of(self.site.saved_input), version_of(self.grad)) != self.versions


def survey(
    roots: Sequence[Tensor | GradientEdge], nodes: Sequence[Any], may_wait: Callable[[Tensor], bool]
) -> Sequence[Site]:
    """The uses of weights whose gradients can wait, in no order.

    Args:
        roots: the outputs of a chunk, or where its backward begins.
        nodes: of the graph behind them.
        may_wait: whether a leaf is a weight.
    """
    entered = Counter([target for node in nodes for target, _ in node.next_functions])  # edges that lead to a node
    entered.update(map(node_of, roots))
    names = [node.name() for node in nodes]
    if REENTRANT in names:
        return ()
    uses = [(node, _RULES[name]) for node, name in zip(nodes, names, strict=True) if name in _RULES]
    return _exclusive_sites(uses, entered, may_wait)


def _exclusive_sites(
    uses: list[tuple[Any, _WeightRule]], entered: Mapping[Any, int], may_wait: Callable[[Tensor], bool]
) -> Sequence[Site]:
    """Those of the uses whose weights are used in no other way."""
    sites = [site for node, rule in uses for site in _site(node, rule, entered, may_wait)]
    while True:  # a weight with a part of its gradient in I gets all of it there, as do the weights beside it
        counts: dict[Any, int] = {}
        for _, ends in sites:
            for end in ends:
                counts[end] = counts.get(end, 0) + 1
        exclusive = [(site, ends) for site, ends in sites if all([counts[end] == entered[end] for end in ends])]
        if len(exclusive) == len(sites):
            return [site for site, _ in sites]
        sites = exclusive


@contextmanager
def waiting(sites: Sequence[Site]) -> Iterator[list[LateGrads]]:
    """Within, a backward passes the sites [2]; the yielded list fills with the parts that W computes."""
    parts: list[LateGrads] = []
    handles = [site.node.register_prehook(partial(_keep, parts, site)) for site in sites]
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def ends_without(sites: Sequence[Site], leaves: Sequence[Tensor]) -> list[Tensor | GradientEdge]:
    """Targets for autograd with which it passes all sites and computes no gradient that can wait [1].

    Args:
        sites: those that it must pass.
        leaves: all that need a gradient, now or later.
    """
    late = {id(weight) for site in sites for weight in site.weights}
    targets: list[Tensor | GradientEdge] = [leaf for leaf in leaves if id(leaf) not in late]
    return targets + [GradientEdge(site.node, 0) for site in sites]


def add_late_gradients(
    parts: list[LateGrads], graph_name: str, backward: Callable[[Sequence[GradientEdge], Sequence[Tensor]], None]
) -> None:
    """W: compute the gradients that waited [3], and let autograd add them to those of the weights [4].

    Weight by weight, so that one gradient is held at a time beside the sums, as in B; those of weights with several
    uses together, as autograd adds the uses up first.

    Args:
        parts: the gradients that waited; emptied, so that each frees what it holds as soon as it is added.
        graph_name: how errors name the graph.
        backward: runs autograd from edges, with the gradients there.

    Raises:
        RuntimeError: a tensor from which a gradient is computed was written since I.
    """
    changed = [part.site.saved_input for part in parts if part.was_written()]
    if changed:
        raise RuntimeError(
            f"the input of a weight of {graph_name} (shape {list(changed[0].shape)}), or the gradient of its output, "
            "was changed in place between the two halves of a backward (a layer that keeps a tensor and writes it in "
            "every forward, say). Make a new one in each forward, or use a schedule of whole backwards, such as 1f1b."
        )
    groups = _by_weight(parts)
    parts.clear()
    while groups:
        backward(*_computed(groups.pop()))


def _by_weight(parts: Sequence[LateGrads]) -> list[list[LateGrads]]:
    """Those whose weights have no other use each in a list of its own; all others in one."""
    uses = Counter([id(weight) for part in parts for weight in part.site.weights])
    groups: dict[int, list[LateGrads]] = {}
    for number, part in enumerate(parts):
        alone = all([uses[id(weight)] == 1 for weight in part.site.weights])
        groups.setdefault(number if alone else -1, []).append(part)
    return list(groups.values())


@torch.no_grad()
def _computed(parts: Sequence[LateGrads]) -> tuple[list[GradientEdge], list[Tensor]]:
    tails = [tail for part in parts for tail in part.site.tails]
    return tails, [grad for part in parts for grad in part.site.late(part.grad)]


def held_by(parts: Iterable[LateGrads]) -> list[Tensor]:
    """The tensors that parts hold from I to W, some of them weights."""
    return [
        tensor
        for site, gradient, _ in parts
        for tensor in (gradient, site.saved_input, *site.late.args)
        if isinstance(tensor, Tensor)
    ]


def _keep(parts: list[LateGrads], site: Site, grads: Sequence[Tensor | None]) -> None:
    if grads[0] is not None:
        versions = version_of(site.saved_input), version_of(grads[0])
        parts.append(LateGrads(site._replace(node=None), grads[0], versions))


def _site(
    node: Any, rule: _WeightRule, entered: Mapping[Any, int], may_wait: Callable[[Tensor], bool]
) -> Iterator[tuple[Site, list[Any]]]:
    """Follow a use down to its leaves, through a transpose and a cast (autocast's) without other uses.

    Returned with the nodes where the paths end.
    """
    edges = node.next_functions
    weights: list[Tensor] = []
    tails: list[GradientEdge] = []
    ends: list[Any] = []
    for number, place in enumerate(rule.places):
        target, index = edges[place]
        if target is None and number:  # no bias, or a frozen one
            continue
        tail = target, index
        while target is not None and target.name() in _BETWEEN and entered[target] == 1:
            target = target.next_functions[0][0]
        weight = getattr(target, "variable", None)
        if weight is None or not may_wait(weight):
            return
        weights.append(weight)
        tails.append(GradientEdge(*tail))
        ends.append(target)
    if getattr(node, rule.saved).unpack_hook not in (None, as_it_was) or _has_hooks(node):
        return
    product = rule.late(node, len(weights) > 1)
    if product is not None:
        yield Site(node, weights, tails, *product), ends


def as_it_was(packed: tuple[object, Tensor]) -> Tensor:
    """The unpack hook of a profile, whose packed tensors are there all the time, beside what counts them."""
    return packed[1]


def _has_hooks(node: Any) -> bool:
    """Whether the node itself has hooks; such a hook sees and changes the gradients of its inputs."""
    handle = node.register_hook(_nothing)  # torch shows the others only to a caller that adds one
    count = len(handle.hooks_dict_ref())
    handle.remove()
    return count > 1


def _nothing(*_: object) -> None:
    """A hook that changes nothing."""


def _of_addmm(node: Any, _: bool) -> tuple[Tensor, WeightGradFunction] | None:
    return _of_product(node, node._saved_mat1) if node._saved_alpha == 1 else None


def _of_mm(node: Any, _: bool) -> tuple[Tensor, WeightGradFunction] | None:
    return _of_product(node, node._saved_self)


def _of_product(node: Any, x: Tensor | None) -> tuple[Tensor, WeightGradFunction] | None:
    strides = tuple(node._saved_mat2_sym_strides)
    if x is None or x.layout is not torch.strided or not strides:  # a sparse weight has none
        return None
    rows, _ = node._saved_mat2_sym_sizes
    by_columns = strides == (1, rows)  # as w.t(); autograd swaps the factors by this
    return x, partial(_product_by_columns if by_columns else _product_by_rows, x)


def _product_by_columns(x: Tensor, gradient: Tensor) -> Sequence[Tensor]:
    return (gradient.t().mm(x.conj()).t(),)


def _product_by_rows(x: Tensor, gradient: Tensor) -> Sequence[Tensor]:
    return (x.t().conj().mm(gradient),)


def _of_convolution(node: Any, has_bias: bool) -> tuple[Tensor, WeightGradFunction] | None:
    x = node._saved_input
    bias = node._saved_bias_sym_sizes_opt if has_bias else None
    arguments = (
        bias, node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
        node._saved_output_padding, node._saved_groups, [False, True, has_bias],
    )
    return x, partial(_convolution, x, node._saved_weight, arguments)


def _convolution(x: Tensor, weight: Tensor, arguments: tuple[Any, ...], gradient: Tensor) -> Sequence[Tensor]:
    _, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(gradient, x, weight, *arguments)
    return (weight_gradient,) if bias_gradient is None else (weight_gradient, bias_gradient)


def _of_embedding(node: Any, _: bool) -> tuple[Tensor, WeightGradFunction] | None:
    if node._saved_sparse:
        return None
    padding = node._saved_padding_idx
    padding = padding - 2**64 if padding >= 2**63 else padding  # torch shows -1 as an unsigned number
    arguments = node._saved_weight_sym_argsize_0, padding, node._saved_scale_grad_by_freq, False
    indices = node._saved_indices
    return indices, partial(_embedding, indices, arguments)


def _embedding(indices: Tensor, arguments: tuple[Any, ...], gradient: Tensor) -> Sequence[Tensor]:
    return (torch.ops.aten.embedding_backward(gradient, indices, *arguments),)


_RULES = {
    "AddmmBackward0": _WeightRule((2,), "_raw_saved_mat1", _of_addmm),
    "MmBackward0": _WeightRule((1,), "_raw_saved_self", _of_mm),
    "ConvolutionBackward0": _WeightRule((1, 2), "_raw_saved_input", _of_convolution),
    "EmbeddingBackward0": _WeightRule((0,), "_raw_saved_indices", _of_embedding),
}
_BETWEEN = ("TBackward0", "ToCopyBackward0")
