"""Visits of layers, one after the other, and the bytes that the backward of each holds.

    sample ──copy──► x ──► layer 0 ──► y ──cut──► x ──► layer 1 ──► ...
                           │ a copy, one at a time, in a sandbox
                           └─ visit: bytes, or seconds or FLOPs (working.py)

Cut: detached, needing a gradient if y did, so that the graph of one layer is gone before the next runs. What layers
stash for later ones is cut too. Nothing of the caller's is changed (sandbox.py).
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from partition.profiles.alike import Memory
from partition.profiles.sandbox import Sandbox
from partition.profiles.skips import renew, skips_of, values_of

__all__ = ["Given", "Layer", "Loss", "Saved", "Storages", "each_layer", "tensors_of"]

T = TypeVar("T")
Visit = Callable[[nn.Module, Any, "Layer"], tuple[T, Any]]
Again = Callable[[T, Any, Any], T]


class Layer(NamedTuple):
    """One layer of a visit.

    Attributes:
        number: its number; of the loss, that of the layers.
        sandbox: where it runs.
        stashes, pops: the keys of its skips.
        aside: tensors that are the caller's, not counted: the target of a loss.
    """

    number: int
    sandbox: Sandbox
    stashes: list[Hashable]
    pops: list[Hashable]
    aside: list[Tensor]


class Loss(NamedTuple):
    """A loss that is visited like a layer behind the last: function(output, target)."""

    function: Callable[[Any, Any], Any]
    target: Any


def each_layer(
    module: nn.Sequential, sample: Any, sandbox: Sandbox, visit: Visit[T], loss: Loss | None = None,
    again: Again[T] = lambda result, x, y: result,
) -> list[T]:
    """visit(copy of the layer, its input, Layer) -> (result, output), layer after layer; the results.

    Without numbers, layers that are alike run once (alike.py).

    Args:
        module: the layers.
        sample: the input of the first.
        sandbox: where they run.
        visit: what to do with each.
        loss: of the output, visited like a layer behind the last; None: there is none.
        again: (result of a layer, input and output of one that is like it) -> its result.
    """
    return copy_context().run(_each_layer, module, sample, sandbox, visit, loss, again)


def _each_layer(
    module: nn.Sequential, sample: Any, sandbox: Sandbox, visit: Visit[T], loss: Loss | None, again: Again[T]
) -> list[T]:
    results = []
    memory = Memory()
    with sandbox.within():
        x = sandbox.moved(sample)
        # Not named_children(), which leaves out the second place of a layer that stands in two.
        for index, (name, layer) in enumerate(module._modules.items()):
            assert layer is not None  # a Sequential that runs has no None
            with _noted(name, layer, sandbox):
                here = Layer(index, sandbox, *skips_of(layer), [])
                made = sandbox.copy(layer)
                with sandbox.running():
                    if sandbox.fake and not here.stashes and not here.pops:
                        result, y = _remembered(memory, layer, made, x, here, visit, again)
                    else:
                        result, y = visit(made, x, here)
                del made
            x = _cut(y)
            del y
            renew(here.stashes, _cut)
            results.append(result)
        if loss is not None:
            with _noted("loss", loss.function, sandbox):
                behind = _LossLayer(loss, sandbox)
                with sandbox.running():
                    results.append(visit(behind, x, Layer(len(module), sandbox, [], [], tensors_of(behind.target)))[0])
    return results


def _remembered(
    memory: Memory, layer: nn.Module, made: nn.Module, x: Any, here: Layer, visit: Visit[T], again: Again[T]
) -> tuple[T, Any]:
    """The result and the output of a layer that runs, or that is like one that ran."""
    before = memory.find(layer, made, x)
    if before is not None:
        y = before.output(x)
        return again(before.result, x, y), y
    with memory.watched(made) as read:
        result, y = visit(made, x, here)
    memory.add(x, y, result, read)
    return result, y


@contextmanager
def _noted(name: str, layer: Any, sandbox: Sandbox) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while profiling layer {name!r} ({type(layer).__name__}) on {sandbox}")
        raise


class _LossLayer(nn.Module):
    """A loss as a layer."""

    def __init__(self, loss: Loss, sandbox: Sandbox) -> None:
        super().__init__()
        function = loss.function
        self.function = sandbox.copy(function) if isinstance(function, nn.Module) else function
        self.target = sandbox.moved(loss.target)

    def forward(self, output: Any) -> Any:
        return self.function(output, self.target)


# -------------------------------------------------------------------------------------------------------------- bytes


class Saved(NamedTuple):
    """The bytes that autograd holds of one layer for its backward, that the layer has, and that it returns.

    Attributes:
        inner: of storages that are made and saved within the layer.
        outer: (number, bytes) of saved storages that are its input or output, or a skip.
        constants: of storages that every forward saves again: tables that the layer keeps.
        output: of what it returns, as a message.
        stashed, popped: (number, bytes) of skips, as messages.
        parameters: each, in the order of `named_parameters`, without numbers.
        buffers: of all buffers.
        leaves: the numbers of the storages of the tensors that it is given, and then of those that it returns.
    """

    inner: int
    outer: tuple[tuple[int, int], ...]
    constants: int
    output: int
    stashed: tuple[tuple[int, int], ...]
    popped: tuple[tuple[int, int], ...]
    parameters: list[Tensor]
    buffers: int
    leaves: tuple[int, ...] = ()

    @property
    def activations(self) -> int:
        """Bytes that its backward needs, of this layer alone."""
        return self.inner + self.constants + sum(size for _, size in self.outer)

    @property
    def held(self) -> int:
        """Bytes of its parameters, each once."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self.parameters}.values())


class Storages:
    """A visit that counts what layers save, and numbers the storages that pass from layer to layer.

    Args:
        aside: tensors whose storages are not counted: the parameters and buffers of the module.

    Attributes:
        entry: (number, bytes) of the storages of the sample.
    """

    def __init__(self, aside: Iterable[Tensor]) -> None:
        self.entry: tuple[tuple[int, int], ...] = ()
        self._aside = {_storage(tensor) for tensor in aside if not is_lazy(tensor)}
        self._skips: dict[Hashable, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}  # of the storages that stand between two layers now
        self._alive: list[Tensor] = []  # a tensor of each: its address stays its own
        self._count = itertools.count()

    def __call__(self, layer: nn.Module, x: Any, here: Layer) -> tuple[Saved, Any]:
        """Run a layer twice, on a clone and on its input: what both runs save is no activation."""
        self._enter(x, not here.number)
        first, _ = copy_context().run(_hold, layer, pytree.tree_map_only(Tensor, _cloned, x), here)
        popped = tuple([self._skips.pop(key) for key in here.pops])
        saved, y = _hold(layer, x, here)
        self._leave(y, here)
        own = {_storage(tensor) for tensor in (*layer.parameters(), *layer.buffers(), *here.aside)} | self._aside
        inner = constants = 0
        outer: dict[int, int] = {}
        for storage in saved.keys() - own:
            size = saved[storage].untyped_storage().nbytes()
            if storage in self._numbers:
                outer[self._numbers[storage]] = size
            elif storage in first:
                constants += size
            else:
                inner += size
        stashed = tuple([self._skips[key] for key in here.stashes])
        shapes = [torch.empty_like(parameter, device="meta") for _, parameter in _parameters(layer)]
        buffers = sum(buffer.nbytes for buffer in layer.buffers())
        result = Saved(inner, tuple(sorted(outer.items())), constants, _message(y), stashed, popped, shapes, buffers,
                       self._leaves(x, y))  # fmt: skip
        self._forget(y)
        return result, y

    def again(self, before: Saved, x: Any, y: Any) -> Saved:
        """The bytes of a layer that is like one that ran: the same, in storages of its own."""
        self._number([x, y])
        leaves = self._leaves(x, y)
        number = dict(zip(before.leaves, leaves, strict=True))
        self._forget(y)
        return before._replace(outer=tuple(sorted((number[old], size) for old, size in before.outer)), leaves=leaves)

    def _leaves(self, x: Any, y: Any) -> tuple[int, ...]:
        return tuple([self._numbers[_storage(tensor)] for tensor in tensors_of([x, y])])

    def _enter(self, x: Any, first: bool) -> None:
        self._number(x)
        if first:
            self.entry = tuple([(self._numbers[_storage(tensor)], tensor.nbytes) for tensor in tensors_of(x)])

    def _leave(self, y: Any, here: Layer) -> None:
        self._number(y)
        for key, value in zip(here.stashes, values_of(here.stashes), strict=True):
            self._number(value)
            tensors = tensors_of(value)
            number = self._numbers[_storage(tensors[0])] if tensors else next(self._count)
            self._skips[key] = number, _message(value)

    def _number(self, value: Any) -> None:
        for tensor in tensors_of(value):
            if _storage(tensor) not in self._numbers:
                self._numbers[_storage(tensor)] = next(self._count)
                self._alive.append(tensor.detach())

    def _forget(self, y: Any) -> None:
        """Forget storages that no later layer reads."""
        between = {_storage(tensor) for tensor in tensors_of([y, values_of(self._skips)])}
        self._numbers = {storage: number for storage, number in self._numbers.items() if storage in between}
        self._alive = [tensor for tensor in self._alive if _storage(tensor) in between]


def _hold(layer: nn.Module, x: Any, here: Layer) -> tuple[dict[int, Tensor], Any]:
    """The storages that a forward saves, each with a tensor that keeps it alive, and what it returns."""
    saved: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # the graph holds this; an output that its own graph holds would never be freed
        saved.setdefault(_storage(tensor), kept)
        return kept

    given = Given(x, here.pops)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda kept: kept):
        y = layer(given.value)
    return saved, y


def _parameters(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(layer.named_parameters(remove_duplicate=False))


def _message(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # data_ptr() is 0 for fakes and for empty tensors
    return address


# ------------------------------------------------------------------------------------------------------- input, output


class _Enter(torch.autograd.Function):
    """The identity from a leaf to the inputs of a layer, which are no views and no leaves: it may write into them."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Tensor], leaf: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in given])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:  # pragma: no cover  # called from C++
        return None, None


class Given:
    """The input of one run of a layer, in a graph of its own; the skips that it takes are put into the context.

    Attributes:
        value: the input.
        leaves: the one leaf of the graph; none where no input needs a gradient.
    """

    def __init__(self, x: Any, pops: list[Hashable]) -> None:
        values, tree = pytree.tree_flatten([x, *values_of(pops)])
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        wanted = [place for place in places if values[place].requires_grad]
        self.leaves: list[Tensor] = []
        for place in places:
            values[place] = values[place].detach()
        if wanted:
            leaf = torch.empty((), device=values[wanted[0]].device, requires_grad=True)
            self.leaves.append(leaf)
            entered = _Enter.apply([values[place] for place in wanted], leaf)  # type: ignore[no-untyped-call]
            for place, value in zip(wanted, entered, strict=True):
                values[place] = value
        self.value, *popped = pytree.tree_unflatten(values, tree)
        for key, value in zip(pops, popped, strict=True):
            renew([key], lambda _, value=value: value)  # type: ignore[misc]  # bound now

    def targets(self, layer: nn.Module) -> list[Tensor]:
        """The tensors whose gradients a whole backward computes."""
        return [*self.leaves, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]


def _cut(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), x)


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
