"""The stage rule: F and B of a stage in a step that carries tangents along.

    read    h, its tangents h'[k] along the directions v[k]          made     y, y'[k] = J (h'[k], v[k])
    F       G(u) = J^T u for a u that requires a gradient; y'[k] is the derivative of <G(u), (h'[k], v[k])> along u:
            the adjoint of the adjoint; or y' comes beside y, by forward mode, see curvature/products/forward_mode.py
    B       G = J^T l with its graph;  (l_in'[k], H v[k]) = derivative of <G, (h'[k], v[k])> + <y, l'[k]>; l_in is in G
    B, of a matrix J^T A J (Gauss-Newton, Fisher): plain backwards of u[k] = A y'[k]
    last stage, Hessian: G is the gradient of the loss itself; F waits for B, so nothing is computed twice

Pearlmutter's R operator (1994), cut at the stages: F sends (h, h'), B sends (l, l'). Everything is autograd's reverse
mode, on the aliases of stage/parameters.py, so it means what `torch.autograd.grad` of the gradient means, and forward
mode is used where it means the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from partition.precision import without_autocast
from pipeline.common.graph import gradients, mark, refuse_tangents
from pipeline.common.twice import refuse_once_differentiable
from pipeline.data.pytrees import Activations, Bundle, Grads, Tree, memory_address, memory_of, versions
from pipeline.data.tangents import Inbox, LeafGrads, outbox
from pipeline.recompute.policy import checkpointing
from pipeline.recompute.snapshot import ForwardSnapshot
from pipeline.stage.layers import StageLayers
from pipeline.stage.stage_parameters import StageParameters


class ProductGraph(NamedTuple):
    """A forward of one chunk, with autograd's graph.

    Attributes:
        leaves: for each tensor read that depends on a parameter, where the graph begins.
        outputs: the outputs.
        roots: those of their tensors that depend on a parameter.
        storages: for each tensor read, the address of the memory with which the layers computed.
    """

    leaves: list[Tensor]
    outputs: Bundle
    roots: list[Tensor]
    storages: tuple[int, ...]


class ProductRecord(NamedTuple):
    """The record of a chunk between F and B.

    Attributes:
        inbox: the values that were read.
        graph: of the forward. None: it is computed again.
        versions: of the tensors that were read.
        lives: for each value that was made, the number of tensors that depend on a parameter.
    """

    inbox: Inbox
    graph: ProductGraph | None
    versions: tuple[int, ...]
    lives: tuple[int, ...] = ()


class Forwards(ABC):
    """The forwards of one stage during one product: new ones, or those of an earlier call once more.

    Attributes:
        snapshot: the state that recomputations must find as it was.
        is_doubtful: whether a layer has an autograd.Function of the user's, as far as is known.
    """

    snapshot: ForwardSnapshot
    is_doubtful: bool

    @abstractmethod
    def standing(self) -> AbstractContextManager[None]:
        """Within: the leaves by which the stage is differentiated stand in its modules."""

    @abstractmethod
    def layer_inputs(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the layers get in place of those that the stage reads: layers may write their input."""

    @abstractmethod
    def run(self, chunk: int, values: Sequence[Tree]) -> Bundle:
        """Run the layers."""

    @abstractmethod
    def first(self, chunk: int, compute: Callable[[], ProductGraph]) -> ProductGraph:
        """The first graph of a chunk. `compute`: makes it, by `run`."""

    @abstractmethod
    def as_at_forward(self, chunk: int) -> AbstractContextManager[None]:
        """Within: what F of a chunk found is as it was."""

    @abstractmethod
    def release(self) -> None:
        """Drop what was kept for recomputations of this product."""


# A graph, with the tangents of the roots, for each direction.
GraphWithTangents: TypeAlias = tuple[ProductGraph, list[list[Tensor]]]


class StageRule:
    """The layers of one stage during one product.

    Args:
        layers: its layers.
        parameters: those that it computes with, and the directions.
        forwards: run the layers.
        along: (stage, chunk, inbox, whether the graph is dropped) -> F of a chunk: `adjoint`, or a ForwardMode.

    Attributes:
        writes_input: whether it writes its input, as far as is known.
    """

    def __init__(
        self,
        layers: StageLayers,
        parameters: StageParameters,
        forwards: Forwards,
        along: Callable[[StageRule, int, Inbox, bool], GraphWithTangents] | None = None,
    ) -> None:
        self.layers = layers
        self.parameters = parameters
        self.forwards = forwards
        self.writes_input = False
        self._along = along or adjoint
        self._records: dict[int, ProductRecord] = {}

    # ------------------------------------------------------------------------------------------------------- F

    def wait(self, chunk: int, inbox: Inbox) -> None:
        """F of the last stage: keep the input for B."""
        self._records[chunk] = ProductRecord(inbox, None, versions(inbox.values.tensors))

    def forward(self, chunk: int, inbox: Inbox, recompute: bool) -> list[Activations]:
        """F: compute a chunk, and the tangents of what comes out."""
        read_versions = versions(inbox.values.tensors)
        with self.forwards.standing():
            graph, tangents = self._along(self, chunk, inbox, recompute)
        tensors = self.forwards.snapshot.buffers.hand_over(graph.outputs.tensors)
        if graph.roots:
            kept_graph = None if recompute else graph
            self._records[chunk] = ProductRecord(inbox, kept_graph, read_versions, live_of(graph.outputs))
        input_memory = () if self.writes_input else inbox.memory
        memory_by_storage = dict(zip(graph.storages, input_memory, strict=bool(input_memory)))
        memory = memory_of(graph.outputs.tensors, memory_by_storage, self.layers.index, chunk)
        return outbox(graph.outputs, tensors, tangents, memory)

    def run(self, chunk: int, inbox: Inbox, dual: Callable[[Tensor, int], Tensor] | None = None) -> ProductGraph:
        """The first graph of a chunk. `dual`: see `computed`."""
        return self.forwards.first(chunk, lambda: self.computed(chunk, inbox, dual))

    def computed(self, chunk: int, inbox: Inbox, dual: Callable[[Tensor, int], Tensor] | None = None) -> ProductGraph:
        """Run the layers, on the parameters and buffers that are in the modules now.

        Args:
            dual: from a leaf and its number to the tensor with a tangent that the layers read in its place.
        """
        leaves: list[Tensor] = []
        read: list[Tensor] = []
        for tensor, needs in zip(inbox.values.tensors, inbox.needs, strict=True):
            if needs:
                leaves.append(mark(tensor.detach().requires_grad_(), f"the input of {self.layers.name}"))
                tensor = leaves[-1] if dual is None else dual(leaves[-1], len(leaves) - 1)
            read.append(tensor)
        layer_inputs = self.forwards.layer_inputs(chunk, read)
        before = versions(layer_inputs)
        outputs = self.forwards.run(chunk, inbox.values.build(layer_inputs))
        if dual is None:
            refuse_tangents(outputs.tensors)
        self.writes_input = self.writes_input or versions(layer_inputs) != before
        roots = [tensor for tensor in outputs.tensors if tensor.requires_grad]
        return ProductGraph(leaves, outputs, roots, tuple(map(memory_address, layer_inputs)))

    # ---------------------------------------------------------------------------------------------- what it rests on

    def targets(self, graph: ProductGraph) -> list[Tensor]:
        """The tensors by which it differentiates: the input, then the parameters."""
        return [*graph.leaves, *[alias for _, alias in self.parameters.owners]]

    def push(self, graph: ProductGraph, tangents: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """For each direction the tangents of the roots: the adjoint of the adjoint."""
        if not tangents:
            return []
        seeds = [_zeros_at_entries(root).requires_grad_() for root in graph.roots]  # zeros: a hook may clip gradients
        pushed = []
        with self.parameters.hooks_asleep():
            grads = gradients_of(graph.roots, self.targets(graph), seeds, True)
            self._check(grads)
            for number, parts in enumerate(self.parameters.directions(tangents)):
                outs, along = self._paired(grads, parts)
                second = gradients_of(outs, seeds, along, retain=not self.parameters.is_last(number))
                rows = zip(seeds, second, strict=True)
                pushed.append([seed.detach() if grad is None else grad for seed, grad in rows])
        return pushed

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        if self.forwards.is_doubtful:
            refuse_once_differentiable(self.layers.name, grads)

    def _paired(
        self, grads: Sequence[Tensor | None], parts: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that are differentiated once more, and the directions.

        Raises:
            RuntimeError: a gradient has no derivative: its layer's backward cannot be differentiated.
        """
        candidates = zip(grads, parts, strict=True)
        pairs = [(grad, part) for grad, part in candidates if grad is not None and part is not None]
        constant = [grad for grad, _ in pairs if not grad.requires_grad]
        if any([bool(grad.any()) for grad in constant]):  # zeros are what they seem: those of sign(), floor()
            raise RuntimeError(
                f"{self.layers.name} has a layer whose backward cannot be differentiated (an autograd.Function that "
                "computes it with numpy, on detached tensors or under no_grad): its second derivative would be taken "
                "for zero. Write its backward with differentiable torch operations."
            )
        live = [(grad, part) for grad, part in pairs if grad.requires_grad]
        return [grad for grad, _ in live], [part for _, part in live]

    # ------------------------------------------------------------------------------------------------------- B

    def take_record(self, chunk: int) -> ProductRecord | None:
        """The record that F has kept."""
        return self._records.pop(chunk, None)

    def graph_of(self, chunk: int, record: ProductRecord) -> ProductGraph:
        """The graph of a chunk whose F has run: kept, or computed again."""
        if record.graph is not None:
            return record.graph
        if versions(record.inbox.values.tensors) != record.versions:
            raise RuntimeError(
                f"the input of {self.layers.name}, chunk {chunk}, was written in place within the call that computes "
                "with it. Let layers write copies."
            )
        graph = self.computed(chunk, record.inbox)
        self.forwards.snapshot.check_same(chunk, [tensor.detach() for tensor in graph.outputs.tensors])
        if live_of(graph.outputs) != record.lives:
            raise RuntimeError(
                f"{self.layers.name}, chunk {chunk}, took another path when it was computed again: other outputs "
                "depend on parameters. A layer depends on state that is no buffer."
            )
        return graph

    def pull_second(
        self,
        graph: ProductGraph,
        tangents: Sequence[Sequence[Tensor]],
        first: Grads,
        seconds: Sequence[Grads],
        wanted: bool,
    ) -> LeafGrads:
        """B of a Hessian: l and l'[k] at the roots -> those at the leaves; parameters get gradient and products.

        Args:
            tangents: of what was read.
            first: l, for each root.
            seconds: l', for each direction and root.
            wanted: whether the gradient is, too.
        """
        twice = bool(tangents)
        seeds = [None if grad is None else grad.detach().requires_grad_(twice) for grad in first]
        return self.differentiated(graph, tangents, self._pulled(graph, seeds, twice), seconds, wanted)

    def pull_end(
        self, graph: ProductGraph, tangents: Sequence[Sequence[Tensor]], first: Grads
    ) -> tuple[LeafGrads, Grads]:
        """B of the last stage, where l is given and is no function of the output: l' is zero there.

        Returns:
            What goes back, and the tangents of the roots along the first direction, where l has a part. These are the
            derivatives by l.
        """
        seeds = [None if grad is None else grad.detach().requires_grad_() for grad in first]
        seeds_of_roots = [seed for seed in seeds if seed is not None]
        back = self.differentiated(graph, tangents, self._pulled(graph, seeds, True), (), False, seeds_of_roots)
        derivatives = iter(back.derivative[len(self.targets(graph)) :])
        return back, tuple([None if seed is None else next(derivatives) for seed in seeds])

    def differentiated(
        self,
        graph: ProductGraph,
        tangents: Sequence[Sequence[Tensor]],
        grads: Sequence[Tensor | None],
        seconds: Sequence[Grads],
        wanted: bool,
        extra_targets: Sequence[Tensor] = (),
    ) -> LeafGrads:
        """The second half of it: `grads` are G; at the last stage, whose loss is in G, `seconds` are empty.

        `extra_targets`: more tensors by which it differentiates; `LeafGrads.derivative` has their parts at its end.
        """
        targets = [*self.targets(graph), *extra_targets]
        if tangents:
            self._check(grads)
        products = []
        for number, parts in enumerate(self.parameters.directions(tangents)):
            outs, along = self._paired(grads, parts)
            for root, grad in zip(graph.roots, seconds[number] if seconds else (), strict=bool(seconds)):
                if grad is not None:
                    outs.append(root)
                    along.append(grad)
            with self.parameters.hooks_asleep():
                products.append(gradients_of(outs, targets, along, retain=not self.parameters.is_last(number)))
        first = tuple([None if grad is None else grad.detach() for grad in grads])
        back = self._handed(graph, [first, *products], first_wanted=0 if wanted else 1)
        return back._replace(derivative=products[0]) if products else back

    def pull_first(self, graph: ProductGraph, groups: Sequence[Grads]) -> LeafGrads:
        """B of J^T A J: plain backwards of the loss's gradient, where it is wanted, and each direction's cotangents."""
        last = None if self.parameters.captured else len(groups) - 1
        return self._handed(
            graph, [self._pulled(graph, grads, retain=number != last) for number, grads in enumerate(groups)]
        )

    def _pulled(
        self, graph: ProductGraph, seeds: Sequence[Tensor | None], create_graph: bool = False, retain: bool = True
    ) -> Grads:
        """A plain backward of the graph. `seeds`: for each root."""
        live = [(root, seed) for root, seed in zip(graph.roots, seeds, strict=True) if seed is not None]
        with self.parameters.hooks_asleep():
            return gradients_of(
                [root for root, _ in live], self.targets(graph), [seed for _, seed in live], create_graph, retain
            )

    def _handed(self, graph: ProductGraph, groups: Sequence[Grads], first_wanted: int = 0) -> LeafGrads:
        """Give the parameters their parts, from group `first_wanted` on; return those of the leaves."""
        inputs = len(graph.leaves)
        self.parameters.add([group[inputs:] for group in groups[first_wanted:]])
        return LeafGrads([group[:inputs] for group in groups])

    def release(self) -> None:
        """Drop all records."""
        self._records.clear()
        self.forwards.release()
        self.parameters.release()


def adjoint(stage: StageRule, chunk: int, inbox: Inbox, drops: bool) -> GraphWithTangents:
    """F of a chunk, with the tangents by the adjoint of the adjoint. `drops`: whether the graph is dropped after it."""
    with checkpointing(drops):
        graph = stage.run(chunk, inbox)
    return graph, stage.push(graph, inbox.tangents) if graph.roots else [[] for _ in inbox.tangents]


def gradients_of(
    outs: Sequence[Tensor],
    targets: Sequence[Tensor],
    along: Sequence[Tensor],
    create_graph: bool = False,
    retain: bool = True,
) -> Grads:
    """`torch.autograd.grad`, also where there is nothing to differentiate; the graph of `outs` stays as a rule."""
    if not outs or not targets:
        return (None,) * len(targets)
    with without_autocast():
        return gradients(outs, targets, along, retain, create_graph)


def _zeros_at_entries(tensor: Tensor) -> Tensor:
    """Zeros like a tensor; at the entries that a sparse one stores, where `torch.zeros_like` stores none."""
    if tensor.layout is torch.strided:
        return torch.zeros_like(tensor, requires_grad=False)
    zeros = tensor.detach().clone()
    (zeros._values() if zeros.layout is torch.sparse_coo else zeros.values()).zero_()
    return zeros


def live_of(outputs: Bundle) -> tuple[int, ...]:
    """The number of tensors of each value that depend on a parameter."""
    return tuple([sum([tensor.requires_grad for tensor in tree.tensors]) for tree in outputs.trees])
