"""How is the backward of a chunk split in two: I, the gradient of its input, and W, those of its weights?

    y = x @ w.t()         AddmmBackward0 --> x          I  autograd goes through the graph as in B, but is not asked for
           ^                    |                          the gradient of w [1]; x and that of y are kept [2]
    gradient of y          TBackward0                   W  w.grad += (gradient of y).t() @ x, by the kernel that
                                |                          autograd would have called: the same bits as B [3]
                         AccumulateGrad(w)

So it is for matrix products (nn.Linear, attention's projections), convolutions and embeddings, which hold nearly all
weights, whatever module calls them. All other gradients (biases, norms, a weight that is also used in another way) are
computed in I. What is held from I to W is x and the gradient of y: the graph itself goes with I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from pipeline.graph import edge, owned

Late = Callable[[Tensor], Tensor]  # from the gradient of an output to the gradient of the weight


class Site(NamedTuple):
    """Where a weight is used in a graph, and how its gradient comes from that of the output there."""

    node: Any
    weight: Tensor
    late: Late


class _Rule(NamedTuple):
    """Which input of a node is the weight, how often it was transposed, and from the node to its gradient."""

    place: int
    transposes: int
    late: Callable[[Any], Late | None]


class Part(NamedTuple):
    """A gradient that is still to be computed."""

    weight: Tensor
    late: Late
    grad: Tensor  # of the output


def find_sites(roots: Sequence[Tensor | GradientEdge], may_wait: Callable[[Tensor], bool]) -> list[Site]:
    """The uses of weights in a chunk's graph whose gradients can wait, in no order.

    Args:
        roots: where the backward begins.
        may_wait: whether a leaf is a weight of the stage.
    """
    found: list[tuple[Any, _Rule]] = []
    stack = [root.node if isinstance(root, GradientEdge) else edge(root).node for root in roots]
    seen = set(stack)
    entered: Counter[Any] = Counter(stack)  # how many ways lead to a node
    while stack:
        node = stack.pop()
        name = node.name()
        if name == _REENTRANT:
            return []
        rule = _RULES.get(name)
        if rule is not None:
            found.append((node, rule))
        for nearer, _ in node.next_functions:
            if nearer is not None:
                entered[nearer] += 1
                if nearer not in seen:
                    seen.add(nearer)
                    stack.append(nearer)
    sites = [site for node, rule in found for site in _site(node, rule, entered, may_wait)]
    uses = Counter(id(site.weight) for site in sites)
    # A weight that is used in another way too gets all of its gradient in I.
    return [site for site in sites if entered[edge(site.weight).node] == uses[id(site.weight)]]


@contextmanager
def waiting(sites: Sequence[Site]) -> Iterator[list[Part]]:
    """Within, a backward passes the sites [2]; what is yielded fills with what is to be computed later."""
    parts: list[Part] = []

    def keep(site: Site) -> Callable[[Sequence[Tensor | None]], None]:
        def hook(grads: Sequence[Tensor | None]) -> None:
            if grads[0] is not None:
                parts.append(Part(site.weight, site.late, grads[0]))

        return hook

    handles = [site.node.register_prehook(keep(site)) for site in sites]
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def ends_without(sites: Sequence[Site], leaves: Sequence[Tensor]) -> list[Tensor | GradientEdge]:
    """What autograd is to be asked for so that it passes all sites and computes no gradient that can wait [1].

    Args:
        sites: where it is to pass.
        leaves: all that a gradient is wanted for, now or later.
    """
    late = {id(site.weight) for site in sites}
    now: list[Tensor | GradientEdge] = [leaf for leaf in leaves if id(leaf) not in late]
    return now + [GradientEdge(site.node, 0) for site in sites]


def catch_up(parts: Sequence[Part]) -> None:
    """W: compute what waited, and add it to the weights' sums [3]. Uses in one chunk are added first, as in B."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for weight, late, given in parts:
            grad = late(given)
            _, earlier = sums.get(id(weight), (weight, None))
            sums[id(weight)] = weight, grad if earlier is None else earlier + grad
        for weight, grad in sums.values():
            if weight.grad is None:
                weight.grad = grad if grad.stride() == weight.stride() else owned(grad, weight)
            else:
                weight.grad.add_(grad)


def _site(node: Any, rule: _Rule, entered: Counter[Any], may_wait: Callable[[Tensor], bool]) -> Iterator[Site]:
    """Down from the use to the leaf, through a transpose and a cast (autocast's) that nobody else uses."""
    down, passed = node.next_functions[rule.place][0], []
    while down is not None and down.name() in (_TRANSPOSE, _CAST) and entered[down] == 1:
        passed.append(down.name())
        down = down.next_functions[0][0]
    weight = getattr(down, "variable", None)
    if weight is None or passed.count(_TRANSPOSE) != rule.transposes or not may_wait(weight):
        return
    late = rule.late(node)
    if late is not None:
        yield Site(node, weight, _cast(late, weight.dtype) if _CAST in passed else late)


def _cast(late: Late, dtype: torch.dtype) -> Late:
    return lambda grad: late(grad).to(dtype)


def _of_addmm(node: Any) -> Late | None:
    return _of_product(node, node._saved_mat1) if node._saved_alpha == 1 else None


def _of_mm(node: Any) -> Late | None:
    return _of_product(node, node._saved_self)


def _of_product(node: Any, x: Tensor | None) -> Late | None:
    rows, _ = node._saved_mat2_sym_sizes
    by_columns = tuple(node._saved_mat2_sym_strides) == (1, rows)  # as w.t() is; else autograd multiplies otherwise
    if x is None or not by_columns or x.layout is not torch.strided:
        return None
    return lambda grad: grad.t().mm(x.conj())


def _of_convolution(node: Any) -> Late | None:
    x, weight, transposed = node._saved_input, node._saved_weight, node._saved_transposed
    how = node._saved_stride, node._saved_padding, node._saved_dilation, transposed, node._saved_output_padding
    groups = node._saved_groups

    def late(grad: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            grad, x, weight, None, *how, groups, [False, True, False]
        )[1]
        return found

    return late


def _of_embedding(node: Any) -> Late | None:
    if node._saved_sparse:
        return None
    indices, count, by_freq = node._saved_indices, node._saved_weight_sym_argsize_0, node._saved_scale_grad_by_freq
    padding = node._saved_padding_idx
    padding = padding - 2**64 if padding >= 2**63 else padding  # torch shows -1 as an unsigned number

    def late(grad: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.embedding_backward(grad, indices, count, padding, by_freq, False)
        return found

    return late


_RULES = {
    "AddmmBackward0": _Rule(2, 1, _of_addmm),
    "MmBackward0": _Rule(1, 1, _of_mm),
    "ConvolutionBackward0": _Rule(1, 0, _of_convolution),
    "EmbeddingBackward0": _Rule(0, 0, _of_embedding),
}
_TRANSPOSE, _CAST = "TBackward0", "ToCopyBackward0"
_REENTRANT = "CheckpointFunctionBackward"  # torch.utils.checkpoint's: it refuses a backward that asks for some leaves
