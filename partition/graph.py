"""The nodes of autograd's graph behind some tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def nodes_of(
    roots: Iterable[Tensor | GradientEdge], until: Iterable[Tensor | GradientEdge] = (), ends: Iterable[Any] = ()
) -> list[Any]:
    """The nodes of the graph behind some tensors, each once, down to the tensors or edges of `until`.

    `ends`: nodes that are left out, with all behind them.
    """
    seen: set[Any] = {None, *map(node_of, until), *ends}  # None: no gradient is needed there
    nodes = [node for node in dict.fromkeys(map(node_of, roots)) if node not in seen]
    seen.update(nodes)
    add, append = seen.add, nodes.append
    for node in nodes:  # which grow
        for nearer, _ in node.next_functions:
            if nearer not in seen:
                add(nearer)
                append(nearer)
    return nodes


def node_of(tensor: Tensor | GradientEdge) -> Any:
    """The node of the graph at which a tensor is made, or a leaf stands."""
    if isinstance(tensor, GradientEdge):
        return tensor.node
    node = tensor.grad_fn
    return get_gradient_edge(tensor).node if node is None else node
