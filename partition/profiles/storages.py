"""The bytes of layers: what each saves, has and returns, and holds between the halves of its backward.

    x ──► layer twice ──► storages that both save: its constants; the others: its activations
                    └──► I ──► storages that stay until W                                 (backwards.py)

A storage that passes from layer to layer has a number, so that what neighbours share can count once.
"""

import itertools
import weakref
from collections.abc import Container, Hashable, Iterable, Mapping
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from partition.contents import nbytes_of, storage_holder, storage_of, tensors_in
from partition.halves import as_it_was, held_by
from partition.profiles.amounts import Bytes
from partition.profiles.backwards import first_half
from partition.profiles.measuring import RunInput, VisitedLayer, outputs_of
from partition.profiles.profile import SkipTraffic, SplitBackwardBytes
from partition.profiles.skips import skips_under


class SavedBytes(NamedTuple):
    """The bytes that autograd holds of one layer for its backward, that the layer has, and that it returns.

    Attributes:
        saved: of storages; shared are those that are its input or output, or a skip.
        constants: of storages that every forward saves again: tables that the layer keeps.
        output: of what it returns, as a message.
        skips: as messages.
        parameters: each, in the order of `named_parameters`, without numbers.
        buffers: of all buffers.
        leaves: the numbers of the storages of the tensors that it is given, and then of those that it returns.
        waits: what a backward in halves holds.
    """

    saved: Bytes
    constants: int
    output: int
    skips: SkipTraffic
    parameters: list[Tensor]
    buffers: int
    leaves: tuple[int, ...] = ()
    waits: SplitBackwardBytes = SplitBackwardBytes()

    @property
    def activations(self) -> int:
        """Bytes that its backward needs, of this layer alone."""
        return self.saved.total + self.constants

    @property
    def held(self) -> int:
        """Bytes of its parameters, each once."""
        return sum(map(nbytes_of, {id(tensor): tensor for tensor in self.parameters}.values()))


class Storages:
    """A visit that counts what layers save, and numbers the storages that pass from layer to layer.

    Args:
        aside: tensors whose storages are not counted: the parameters and buffers of the module.

    Attributes:
        entry: (number, bytes) of the storages of the sample.
    """

    def __init__(self, aside: Iterable[Tensor]) -> None:
        self.entry: tuple[tuple[int, int], ...] = ()
        self._aside = {storage_of(tensor) for tensor in aside if not is_lazy(tensor)}
        self._skips: dict[Hashable, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}  # of the storages that stand, or stood, between two layers
        self._alive: list[Any] = []  # what keeps the address of each its own
        self._count = itertools.count()

    def __call__(self, layer: nn.Module, x: Any, visited: VisitedLayer) -> tuple[SavedBytes, Any]:
        """Run F of a layer twice, on a clone and on its input: what both save is no activation. Then its I."""
        self._number(x)
        if not visited.number:
            self.entry = tuple([(self._numbers[storage_of(tensor)], tensor.nbytes) for tensor in tensors_in(x)])
        first = copy_context().run(_WatchedForward, layer, pytree.tree_map_only(Tensor, _cloned, x), visited).storages
        popped = tuple([self._skips.pop(key) for key in visited.pops])
        run = _WatchedForward(layer, x, visited)
        y = run.output
        self._leave(y, visited)
        excluded = {storage_of(tensor) for tensor in (*layer.parameters(), *layer.buffers(), *visited.aside)}
        excluded |= self._aside
        constants = (run.saved.keys() & first.keys()) - excluded - self._numbers.keys()
        excluded |= constants
        saved = self._bytes({key: size for key, size in run.saved.items() if key not in excluded})
        waits = {key: size for key, size in run.first_half(layer, visited).items() if key not in excluded}
        inputs = self._bytes({key: waits[key] for key in waits.keys() & run.saved.keys()})
        gradients = sum(waits[key] for key in waits.keys() - run.saved.keys())
        parameters = layer.named_parameters(remove_duplicate=False)
        result = SavedBytes(
            saved, sum(run.saved[key] for key in constants), _message(y),
            SkipTraffic(tuple([self._skips[key] for key in visited.stashes]), popped),
            [parameter.detach().to("meta") for _, parameter in parameters],
            sum(map(nbytes_of, layer.buffers())), self._leaves(x, y),
            SplitBackwardBytes(inputs, gradients, run.rise(excluded | self._numbers.keys() | waits.keys())),
        )  # fmt: skip
        return result, y

    def _bytes(self, saved: Mapping[int, int]) -> Bytes:
        """The bytes of storages: of those within the layer, and of others by number."""
        inner = sum(size for storage, size in saved.items() if storage not in self._numbers)
        outer = [(self._numbers[storage], size) for storage, size in saved.items() if storage in self._numbers]
        return Bytes(inner, tuple(sorted(outer)))

    def reuse(self, earlier: SavedBytes, x: Any, y: Any) -> SavedBytes:
        """The bytes of a layer that is like one that ran: the same, in storages of its own."""
        self._number([x, y])
        leaves = self._leaves(x, y)
        number = dict(zip(earlier.leaves, leaves, strict=True))

        def renumbered(amount: Bytes) -> Bytes:
            return amount._replace(shared=tuple(sorted((number[old], size) for old, size in amount.shared)))

        waits = earlier.waits._replace(inputs=renumbered(earlier.waits.inputs))
        return earlier._replace(saved=renumbered(earlier.saved), waits=waits, leaves=leaves)

    def _leaves(self, x: Any, y: Any) -> tuple[int, ...]:
        return tuple([self._numbers[storage_of(tensor)] for tensor in tensors_in([x, y])])

    def _leave(self, y: Any, visited: VisitedLayer) -> None:
        self._number(y)
        for key, value in zip(visited.stashes, skips_under(visited.stashes), strict=True):
            self._number(value)
            self._skips[key] = next(self._count), _message(value)  # one tensor under two keys travels twice

    def _number(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if storage_of(tensor) not in self._numbers:
                self._numbers[storage_of(tensor)] = next(self._count)
                self._alive.append(storage_holder(tensor))


class _WatchedForward:
    """One forward of a layer, and its I.

    Attributes:
        output: what it returns.
        saved: the bytes of the storages that it saves.
        storages: these: no other storage has the address of one while this is there, though their memory is freed.
    """

    def __init__(self, layer: nn.Module, x: Any, visited: VisitedLayer) -> None:
        self.saved: dict[int, int] = {}
        self.storages: dict[int, Any] = {}
        self._waiting: list[Tensor] = []
        self._tokens: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()
        self._changes: list[tuple[int, int]] = []  # during I: storages that the graph frees, or that wait
        self._run_input = RunInput(x, visited.pops)
        with torch.autograd.graph.saved_tensors_hooks(self._hold, as_it_was):
            self.output = layer(self._run_input.value)

    def _hold(self, tensor: Tensor) -> tuple["_Token", Tensor]:
        detached = tensor.detach()  # the graph holds this; an output that its own graph holds would never be freed
        storage, size = storage_of(detached), _nbytes(detached)
        token = self._tokens.get(storage)
        if token is None:
            token = self._tokens[storage] = _Token()
            weakref.finalize(token, self._changes.append, (storage, -size))
        if storage not in self.saved:
            self.saved[storage] = size
            self.storages[storage] = storage_holder(detached)
        return token, detached

    def first_half(self, layer: nn.Module, visited: VisitedLayer) -> dict[int, int]:
        """Run I: the bytes of the storages that are held from then to W."""
        self._changes.clear()
        outputs = outputs_of(self.output, visited.stashes)
        gradients = [tensor.detach().clone() for tensor in outputs]
        parts = first_half(outputs, gradients, self._run_input.targets(layer), list(layer.parameters()), self._wait)
        self._waiting = held_by(parts)
        return {storage_of(tensor): _nbytes(tensor) for tensor in self._waiting}

    def _wait(self, gradient: Tensor) -> None:
        self._changes.append((storage_of(gradient), _nbytes(gradient)))

    def rise(self, stays: Container[int]) -> int:
        """By how much more was held in I than before it, at the most.

        Args:
            stays: storages that are not freed in I.
        """
        counted = set(self.saved)
        current = peak = 0
        for storage, change in self._changes:
            if (change > 0 and storage not in counted) or (change < 0 and storage not in stays):
                current, peak = current + change, max(peak, current + change)
                counted.add(storage)
        return peak


class _Token:
    """Of a storage: it is there as long as a graph holds the storage."""


def _message(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
