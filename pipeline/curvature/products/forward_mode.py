"""Forward mode: the tangents of what a stage makes, computed beside the values, where they are those of reverse mode.

    h, h', parameters with their parts of v  --layers, on dual tensors-->  y, y' = J (h', v)      and the graph, for B

Per linear layer that is 3 matrix products, and 5 by the adjoint of the adjoint (stage/stage_rule.py). It is used for
one direction at a time: of four the adjoint's graph is shared, which costs less. A graph that is kept must hold values,
so it is made by a run of its own, which makes 4: so numbers do not depend on what is kept. It is plain forward mode,
with no reverse mode under it: forward over reverse, and reverse over forward, are wrong for layer norm in torch 2.13
(pytorch/pytorch#196700).

A chunk takes the adjoint all the same where forward mode could be another function's derivative, or has none:

    no_grad in a layer            reverse mode sees constants; here `ConstantsWithoutGrad` makes them some
    no_grad in a loss of torch's  seen by the same mode: `gaussian_nll_loss` is the only one
    a gradient within a layer     forward over reverse: seen by the same mode, and in the graph
    autograd.Functions, scripts   in the graph
    _MODES_DIFFER                 in the graph: operations of torch whose two modes take a kink, or a row, differently
    no forward derivative         an error of torch's: the chunk runs again
    hooks of tensors              seen by the same mode
    captured parameters           carry no tangent

The first chunk in a product that compares, and in the first product of all, is computed both ways. A stage where they
differ takes the adjoint from then on. Dual levels are the process's, not a thread's: where stages have threads of their
own the adjoint is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from partition.graph import nodes_of
from pipeline.common.graph import OF_SCRIPTS
from pipeline.common.twice import is_foreign
from pipeline.curvature.products.finite_differences import norm
from pipeline.data.tangents import Inbox
from pipeline.recompute.policy import checkpointing
from pipeline.stage.stage_rule import GraphWithTangents, ProductGraph, StageRule, adjoint

_MODES_DIFFER = {  # node -> where its two modes differ
    "FmaxBackward0": "equal arguments",
    "XlogyBackward0": "0 log 0",
    "Atan2Backward0": "0 and 0",
    "PowBackward1": "0 to the power 0",
    "SincBackward0": "0",
    "LogitBackward0": "beyond eps",
    "PutBackward0": "an index that comes twice",
    "ScatterBackward0": "an index that comes twice",
    "IndexCopyBackward0": "an index that comes twice",
    "IndexPutBackward0": "an index that comes twice, unless it accumulates",
    "AsStridedScatterBackward0": "memory that is written twice",
    "MaxUnpool2DBackward0": "an index that comes twice",
    "MaxUnpool3DBackward0": "an index that comes twice",
    "ScatterReduceBackward0": "a product; equal numbers, of which one is the largest",
    "ClampBackward0": "a bound that is a tensor and is met",
    "LogSigmoidBackward0": "values, rounded otherwise",
    "LinalgCholeskyExBackward0": "a direction that is not symmetric",
    "LinalgEighBackward0": "a direction that is not symmetric",
    "CholeskyInverseBackward0": "a direction that is not triangular",
    "TriangularSolveBackward0": "a direction that is not triangular",
    "LinalgDetBackward0": "a singular matrix",
    "LinalgLuBackward0": "a singular matrix",
    "LinalgLuFactorExBackward0": "a singular matrix",
}
_UNLESS: dict[str, Callable[[Any], bool]] = {
    "IndexPutBackward0": lambda node: bool(node._saved_accumulate),
    "ScatterReduceBackward0": lambda node: node._saved_reduce in ("sum", "mean"),
}
# Without what forward_ad.make_dual loads before: decompositions of some operations, compiled by torch.jit, in seconds.
_make_dual: Callable[..., Tensor] = torch._VF._make_dual
_OTHER_DERIVATIVES: frozenset[Callable[..., Any]] = frozenset({
    torch.autograd.grad, torch.autograd.backward, Tensor.backward, Tensor.register_hook,
    functional.gaussian_nll_loss,  # it clamps under no_grad, and no mode is asked within a function of torch's
})  # fmt: skip
# Arithmetic with a number of Python, and the operation that takes it for one. As a tensor it has a tangent of zeros, of
# which torch computes products in Python, on the meta device: 0.2 ms each.
_WITH_NUMBERS: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(owner, name): getattr(torch.ops.aten, name).Scalar
    for owner, name in product((torch, Tensor), ("add", "sub", "mul", "div"))
}
_TENSOR_AND_NUMBER = frozenset(product((Tensor, torch.nn.Parameter), (int, float)))


class ForwardMode:
    """The tangents of one stage in a product of one direction, by forward mode: what `adjoint` computes, in less time.

    Args:
        agrees: for stages that were computed both ways, whether the tangents were the same. This product adds to it.
        compares: whether to compute both ways though it is known.
    """

    def __init__(self, agrees: dict[int, bool], compares: bool) -> None:
        self._agrees = agrees
        self._compares = compares
        self._is_on = True  # a call begins with it, so that its numbers are those of all others
        self._is_sound: bool | None = None  # of a stage whose graph is always the same

    def __call__(self, stage: StageRule, chunk: int, inbox: Inbox, drops: bool) -> GraphWithTangents:
        index = stage.layers.index
        if self._is_on and self._agrees.get(index, True):
            with checkpointing(drops):
                graph, tangents = self._run(stage, chunk, inbox)
            if graph is not None and not graph.roots:
                return graph, [[]]
            if graph is not None and self._is_trusted(stage, chunk, inbox, graph, tangents):
                return graph if drops else _recomputed(stage, chunk, inbox), [tangents]
            self._is_on = False
            if chunk == 0:  # nor will it be so in other products
                self._agrees[index] = False
            stage.forwards.snapshot.roll_back(chunk)
        return adjoint(stage, chunk, inbox, drops)

    def _run(self, stage: StageRule, chunk: int, inbox: Inbox) -> tuple[ProductGraph | None, list[Tensor]]:
        """Run the layers on dual tensors. No graph: they have no forward derivative, or another."""
        parameters, (tangents,) = stage.parameters, inbox.tangents
        constants = ConstantsWithoutGrad()
        try:
            with forward_ad.dual_level(), saved_tensors_hooks(_pack_shape, _unpack_shape):
                owners = parameters.aliases.trained
                parts = [(owner, alias, parameters.parts(owner, alias)[0]) for owner, alias in owners]
                duals = {id(owner): _dual(alias, part) for owner, alias, part in parts if part is not None}
                with parameters.aliases.stand_back(duals), constants:
                    graph = stage.run(chunk, inbox, lambda leaf, number: _dual(leaf, tangents[number]))
                return None if constants.differs else graph, _tangents_of(graph.roots)
        except (RuntimeError, NotImplementedError):  # if it is no matter of forward mode, it comes again
            return None, []

    def _is_trusted(
        self, stage: StageRule, chunk: int, inbox: Inbox, graph: ProductGraph, tangents: Sequence[Tensor]
    ) -> bool:
        if self._is_sound is None or not stage.layers.is_quiet:
            self._is_sound = not stage.parameters.captured and is_sound(graph.roots)
        index = stage.layers.index
        if self._is_sound and (self._compares or index not in self._agrees):
            self._compares = False
            adjoint_graph = _recomputed(stage, chunk, inbox)
            (adjoints,) = stage.push(adjoint_graph, inbox.tangents)
            are_equal = all(map(torch.equal, graph.roots, adjoint_graph.roots))
            self._agrees[index] = are_equal and _are_near(tangents, adjoints)
        return self._is_sound and self._agrees[index]


def _recomputed(stage: StageRule, chunk: int, inbox: Inbox) -> ProductGraph:
    """The graph of a chunk that has run, with what its backward needs."""
    with stage.forwards.as_at_forward(chunk):
        return stage.computed(chunk, inbox)


class ConstantsWithoutGrad(TorchFunctionMode):
    """Within: what is computed under no_grad has no tangent, as it has no gradient, nor have Python's numbers.

    Attributes:
        differs: whether something within took a gradient, will change one, or has another derivative in forward mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.differs = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.differs = self.differs or func in _OTHER_DERIVATIVES
        if func in _WITH_NUMBERS and not kwargs and tuple(map(type, args)) in _TENSOR_AND_NUMBER:
            func = _WITH_NUMBERS[func]
        if torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        with forward_ad._set_fwd_grad_enabled(False):
            return func(*args, **(kwargs or {}))


def _pack_shape(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Autograd's graph holds shapes and no values: it can be looked at, but not differentiated.

    Else it would hold what a backward through the tangents needs, which nobody asks for.
    """
    return tensor.shape, tensor.dtype


def _unpack_shape(packed: tuple[torch.Size, torch.dtype]) -> Tensor:
    shape, dtype = packed
    return torch.empty(shape, dtype=dtype, device="meta")


def _dual(tensor: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, within `forward_ad.dual_level()`; nn.Parameter's instance where `tensor` is."""
    dual = _make_dual(tensor, tangent, level=0)
    vars(dual).update(vars(tensor))
    if isinstance(tensor, torch.nn.Parameter):
        vars(dual)["_is_param"] = True  # what isinstance asks
    return dual


def _tangents_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tangents of dual tensors, without a graph; zeros for one that has none."""
    tangents = []
    for tensor in tensors:
        tangent = forward_ad.unpack_dual(tensor).tangent
        is_zero = tangent is None or tangent._is_zerotensor()
        tangents.append(torch.zeros_like(tensor, requires_grad=False) if is_zero else tangent.detach())
    return tangents


def is_sound(roots: Sequence[Tensor]) -> bool:
    """Whether a graph has no operation whose forward derivative could be another one than its reverse's."""
    for node in nodes_of(roots):
        name = node.name()
        differs = name in _MODES_DIFFER and not (name in _UNLESS and _UNLESS[name](node))
        if differs or "BackwardBackward" in name or OF_SCRIPTS in name or is_foreign(node):
            return False
        # Reverse mode takes the row of padding for a constant; -1, as an unsigned number, stands for none.
        if name == "EmbeddingBackward0" and 0 <= node._saved_padding_idx < 1 << 63:
            return False
    return True


def _are_near(tangents: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether they differ by no more than rounding does, which is taken as half the digits."""
    distance = norm([one - other for one, other in zip(tangents, expected, strict=True)])
    precision: float = max([torch.finfo(one.dtype).eps for one in tangents]) ** 0.5
    return distance <= precision * norm(expected)
