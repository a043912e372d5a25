"""Walks over a stage's autograd graph: the leaves that it reaches, and who may receive their gradients.

        entry leaf --Entry--> layers --> outputs          [1] the stage's inputs, cut off from the stage before
    alias of a parameter ----^   ^                        [2] the parameters, as leaves of this call
                foreign leaf ----'                        [3] anything else: captured in a list, a closure, a cache

`explore` walks the graph of one chunk after F. [1] and [2] are known. A leaf [3] that belongs to the user becomes an
input of the call like a parameter; one that belongs to another stage or to an earlier call shows a value that
bypassed the stage boundary, and is refused by name: its gradient would be lost without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import GradientEdge

from partition.graph import node_of, nodes_of
from partition.precision import widened
from pipeline.common.errors import PLAIN
from pipeline.common.interrupts import calls_users_code

_engine = torch.autograd.Variable._execution_engine
OF_SCRIPTS = "DifferentiableGraph"  # in the name of a node that torch.jit has compiled
_MARK = "_penstock_leaf"  # set on leaves of the Pipe: describes what they stand for


def mark(leaf: Tensor, description: str) -> Tensor:
    """Mark a leaf of a stage with what it stands for, so that another stage that reaches it can name it."""
    setattr(leaf, _MARK, description)
    return leaf


def refuse_marked(
    leaf: Tensor,
    who: str,
    lost: str = "gradient",
    through: str = "input (kept on a module, in a closure or in a cache)",
    remedy: str = "Return it from the stage that makes it and pass it on, or put these layers into one stage.",
) -> None:
    """Raise RuntimeError if a leaf that a graph reaches is a marked one, of another stage or of an earlier call.

    Args:
        leaf: the leaf.
        who: a stage, or the loss, that computes with it.
        lost: what the error says is lost.
        through: the way by which it should have come.
        remedy: what to do.
    """
    description = getattr(leaf, _MARK, None)
    if description is not None:
        raise RuntimeError(
            f"{who} computes with a tensor that depends on {description} but did not come through its {through}. "
            f"Its {lost} would be lost. {remedy}"
        )


class Roots(NamedTuple):
    """The roots of a backward, their gradients, and the foreign leaves that the graph reaches.

    A root is a tensor; or, where the tensor itself is not needed any more, its edge in the graph.
    """

    tensors: Sequence[Tensor | GradientEdge]
    grads: Sequence[Tensor]
    foreign: dict[int, Tensor]  # by id


def roots_of(grads: Sequence[Tensor | None], outputs: Sequence[Tensor | GradientEdge | None]) -> Roots:
    """Begin at the outputs that have a gradient; None stands for one that needs none."""
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out is not None and grad is not None]
    roots, into = zip(*pairs, strict=True) if pairs else ((), ())
    return Roots(roots, into, {})


def explore(
    roots: Sequence[Tensor | GradientEdge], until: Sequence[Tensor | GradientEdge] = ()
) -> dict[int, Tensor]:
    """The leaves that the graph behind some tensors reaches, by id, down to the tensors or edges of `until`."""
    return leaves_at(leaf_nodes(nodes_of(roots, until)))


def leaf_nodes(nodes: Sequence[Any]) -> list[Any]:
    """Those of the nodes at which a leaf stands."""
    return [node for node in nodes if type(node) is _LeafNode]


def leaves_at(nodes: Sequence[Any]) -> dict[int, Tensor]:
    """The leaves at such nodes whose gradients can be requested, by id."""
    return requestable({id(leaf): leaf for leaf in [node.variable for node in nodes]})


def path_of(roots: Sequence[Tensor]) -> list[tuple[str, str]]:
    """The path that a forward took, as the graph behind some tensors shows it: what it has, and how many or which.

    It has nodes, whose number comes first, and numbers that autograd.Functions keep for their backward, which no output
    shows. Whole numbers are left out: they may be names rather than factors.
    """
    nodes = nodes_of(roots)
    functions = [node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)]
    entries = [pair for node in functions for pair in vars(node).items()]
    kept = [(f"an autograd.Function kept {name}", repr(value)) for name, value in entries if type(value) is float]
    return [("autograd nodes", str(len(nodes))), *kept]


def saved(roots: Iterable[Tensor | GradientEdge]) -> Iterator[Tensor]:
    """The tensors that a graph has saved for its backward."""
    names: dict[type, list[str]] = {}
    for node in nodes_of(roots):
        if type(node) not in names:
            names[type(node)] = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in names[type(node)]:
            value = getattr(node, name)
            yield from (part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tensor))


def requestable(leaves: dict[int, Tensor]) -> dict[int, Tensor]:
    """Those leaves that are referenced from outside their graph. The gradients of others cannot be requested.

    The others are made within a forward: `pos.detach().requires_grad_()`, to differentiate an energy by it.
    """
    return {key: leaves[key] for key in leaves if _references(leaves, key) > _ALONE}


def _references(leaves: dict[int, Tensor], key: int) -> int:
    return sys.getrefcount(leaves[key])


def _of_a_leaf() -> tuple[Any, int]:
    """The class of the node of a leaf, and the result of `_references` for one that only its graph holds."""
    with torch.inference_mode(False), torch.enable_grad():
        root: Any = torch.ones((), requires_grad=True, device="cpu") * 2
    node = root.grad_fn.next_functions[0][0]
    return type(node), _references({0: node.variable}, 0)


_LeafNode, _ALONE = _of_a_leaf()


def holds(roots: Sequence[Tensor | GradientEdge], name: str) -> bool:
    """Whether a graph has a node whose name contains `name`."""
    return any(name in node.name() for node in nodes_of(roots))


def asks_for_all_leaves() -> bool:
    """Whether the backward under way is for all leaves. With `inputs=`, autograd runs only what leads to these."""
    return bool(_engine.is_checkpoint_valid())  # as torch's reentrant checkpoint asks


def marked_under_way() -> frozenset[int]:
    """The ids of all marked leaves behind the roots of the backward under way, for use within it.

    Autograd is not to run the nodes in front of most of them if only some gradients are asked for, and says nothing of
    these nodes. So the graph is walked from its roots, once for each backward.
    """
    task = torch._C._current_graph_task_id()
    walked, marked = _walked.get()
    if walked != task:
        leaves = [node.variable for node in leaf_nodes(nodes_of(_roots_under_way()))]
        marked = frozenset([id(leaf) for leaf in leaves if getattr(leaf, _MARK, None) is not None])
        _walked.set((task, marked))
    return marked


_walked: ContextVar[tuple[int, frozenset[int]]] = ContextVar("walked", default=(-1, frozenset()))
_RUNNER = torch.autograd.graph._engine_run_backward.__code__  # through it go backward() and grad()


def _roots_under_way() -> Sequence[Tensor | GradientEdge]:
    """The roots of all backwards under way. Torch's engine does not tell them, and runs nodes in threads of devices."""
    return [root for innermost in sys._current_frames().values() for root in _roots_in(innermost)]


def _roots_in(frame: FrameType | None) -> Iterator[Tensor | GradientEdge]:
    """The roots of the backwards that the functions of one thread are in."""
    while frame is not None:
        if frame.f_code is _RUNNER:
            yield from frame.f_locals["t_outputs"]
        frame = frame.f_back


def edge(tensor: Tensor) -> GradientEdge:
    """The edge of the graph that leads to a tensor."""
    return GradientEdge(node_of(tensor), tensor.output_nr)


@calls_users_code
def run_backward(
    roots: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor],
    retain: bool,
    ends: Sequence[Tensor | GradientEdge] = (),
) -> None:
    """`torch.autograd.backward` without its checks, which take time on small graphs.

    `ends`: the targets, if not all leaves.
    """
    _engine.run_backward(
        tuple(roots), tuple(grads), retain, False, tuple(ends), allow_unreachable=True, accumulate_grad=True
    )


def finish_backward(roots: Sequence[Tensor]) -> None:
    """The same from scalars, for a backward that must be finished even if a signal comes (common/interrupts.py)."""
    grads = tuple([root.detach() for root in roots])
    _engine.run_backward(tuple(roots), grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


@calls_users_code
def gradients(
    roots: Sequence[Tensor | GradientEdge],
    targets: Sequence[Tensor],
    grads: Sequence[Tensor],
    retain: bool,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(..., allow_unused=True)` without its checks, as above."""
    result: tuple[Tensor | None, ...] = _engine.run_backward(
        tuple(roots), tuple(grads), retain, create_graph, tuple(targets), allow_unreachable=True, accumulate_grad=False
    )
    return result


class StrayGradientGuard:
    """A guard against gradients that arrive while the stage's own backward is not running: they would be lost.

    Such a gradient comes, for example, of an auxiliary loss that a layer keeps and the caller adds to the loss. As a
    hook it costs too much for each alias in each backward, so aliases have it in validating calls, and when a graph
    still holds one after the stage's own backward. A gradient that came before is found as that begins.

    With `inputs=`, autograd runs no node that does not lead to one of these, so nothing arrives: `marked_under_way`.
    """

    __slots__ = ("is_needed", "_stage", "_is_on")

    def __init__(self, stage: str) -> None:
        self.is_needed = False  # a graph holds an alias after the stage's own backward
        self._stage = stage
        self._is_on = False

    def __enter__(self) -> None:
        """Within: the stage's own backward runs."""
        self._is_on = True

    def __exit__(self, *exc: object) -> None:
        self._is_on = False

    def __call__(self, _: Tensor | None = None) -> None:
        """Check a gradient that arrives at an alias or at the cut.

        Raises:
            RuntimeError: it comes from another backward.
        """
        if not self._is_on:
            raise RuntimeError(
                f"a backward from outside reached {self._stage}: a tensor that a layer computed there was used "
                "without passing through the output of the Pipe (an auxiliary loss left on a module, an activity "
                "penalty, an activation that a hook keeps, a backward() within a forward). Its gradient would be lost. "
                "Return it as part of the output."
            )


class Entry(torch.autograd.Function):
    """The identity between a stage's leaves and its layers' inputs, which are no views: a layer may write them.

    Its backward puts the gradients into `arrived` as they come. Through the leaves' `.grad` they would be copied into
    the leaves' layout, and sums over another layout round differently.
    """

    @staticmethod
    def forward(
        ctx: Any, guard: StrayGradientGuard, arrived: list[Tensor | None], tensors: Sequence[Tensor], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.guard = guard
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pragma: no cover
        ctx.guard()
        ctx.arrived[:] = grads
        return (None,) * (len(grads) + 3)


# Function.apply without its Python part, which takes as long as the rest.
_enter: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, Entry).apply


def enter(
    guard: StrayGradientGuard, arrived: list[Tensor | None], tensors: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Tensors with the values of `tensors` whose gradients come into `arrived`."""
    if torch._C._are_functorch_transforms_active():
        Entry.apply(guard, arrived, tensors, *leaves)  # type: ignore[no-untyped-call]  # it says what torch.func lacks
    return _enter(guard, arrived, tensors, *leaves)


def sum_with(total: Tensor | None, grad: Tensor, owner: Tensor) -> Tensor:
    """The sum of an owner's gradients so far (None: there are none) and one more; in float32 for half precision.

    It shares memory with nothing, and has its owner's layout: autograd may give one tensor to several owners.
    """
    grad = widened(grad)
    if total is not None:
        return total + grad
    if grad.is_sparse:
        return grad.clone()
    return torch.empty_like(owner, dtype=grad.dtype, requires_grad=False).copy_(grad)


class Gate:
    """A gate that passes gradients from a recomputation to its inputs, except while it is closed.

    While the gradient of a captured leaf is computed, paths that lead to it outside the Pipe, through the input or
    through another owner, are closed: the caller's own backward adds those. Derivatives of the result pass.
    """

    def __init__(self) -> None:
        self.is_open = True

    def enter(self, tensor: Tensor) -> Tensor:
        """A view behind the gate. It has no hooks: those of `tensor` run later, once, on the returned gradient."""
        return _through(self, tensor)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within: nothing passes."""
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = True


class GateFunction(torch.autograd.Function):
    """The identity that a gate opens and closes."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, tensor: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # pragma: no cover
        return None, grad if ctx.gate.is_open else None


_through: Callable[..., Tensor] = GateFunction.apply


def has_tangents() -> bool:
    """Whether forward-mode AD is on: tensors may carry tangents."""
    return torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def refuse_tangents(tensors: Sequence[Tensor]) -> None:
    """Raise where a forward-mode tangent would be lost.

    Raises:
        RuntimeError: a tensor carries one.
    """
    if has_tangents():
        if any(unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise RuntimeError(
                "forward-mode AD cannot go through a Pipe: an input, a parameter, a buffer or a captured tensor "
                "carries a tangent, which would be lost. Use torch.autograd.grad with create_graph=True, or "
                f"{PLAIN}."
            )
