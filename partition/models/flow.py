"""The flow of values through one run of a model: from which values each tensor was computed.

    Flow.watching() ── each operation outside torch's kernels ──► StorageVersion: when, and from which nodes
                    └─ numbers that Python is told: x.item(), a mask that chooses rows ──► Flow.host_reads

No number is compared, so what follows from a flow is true of other inputs that take the same way through the model's
code. What Python is told may decide the way: what is computed later counts as computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from partition.contents import storage_holder, storage_of, tensors_in, written_by
from partition.randomness import states_of_torch


class StorageVersion(NamedTuple):
    """The numbers of a storage, from when they were computed until something is written there.

    Attributes:
        time: of the operation, on the clock of the flow, or when it was first seen; -1: it was there before.
        parents: the nodes that it was given.
        previous: the node of the same storage into which it wrote; None: it made the storage.
        drawn: whether random numbers were drawn for it.
        returned_by: where it is what a module returned: when that call began, and the places among the leaves.
    """

    time: int
    parents: tuple[int, ...] = ()
    previous: int | None = None
    drawn: bool = False
    returned_by: tuple[int, tuple[int, ...]] | None = None


class Flow:
    """The flow of values through one run.

    Args:
        tensors: those that are there before it. Others that no operation makes, Python has made: of what it was told.
        before_write: called with a tensor before something is written there.

    Attributes:
        before_write: see above.
        nodes: in the order in which they were computed.
        host_reads: when Python was told numbers, and of which nodes.
        roots: the nodes that no operation has made, and their storages.
    """

    def __init__(self, tensors: Iterable[Tensor], before_write: Callable[[Tensor], object] = id) -> None:
        self.before_write = before_write
        self.nodes: list[StorageVersion] = []
        self.host_reads: list[tuple[int, tuple[int, ...]]] = []
        self.roots: dict[int, int] = {}
        self._time = -1
        self._latest: dict[int, tuple[int, Any]] = {}  # the node of each storage, and what keeps its address its own
        for tensor in tensors:
            self.node(tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within: note what is computed."""
        with _OperationObserver(self), _ReadObserver(self):
            yield

    def tick(self) -> int:
        """The time, which goes on."""
        self._time += 1
        return self._time

    def node(self, tensor: Tensor) -> int:
        """The node that a tensor's numbers are."""
        storage = storage_of(tensor)
        if storage not in self._latest:
            self.roots[self._put(tensor, StorageVersion(-1 if self._time < 0 else self.tick()))] = storage
        return self._latest[storage][0]

    def computed(self, number: int) -> int:
        """The node whose numbers a node has: not those as which modules have returned it, as it was."""
        while (node := self.nodes[number]).returned_by is not None and node.previous is not None:
            number = node.previous
        return number

    def record_return(self, begin: int, leaves: Iterable[Any]) -> None:
        """Note what a module returns that was called at `begin`."""
        places: dict[int, list[int]] = {}
        tensors = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for place, leaf in tensors:
            places.setdefault(self.node(leaf), []).append(place)
        time = self.tick()
        for leaf, node in [(leaf, self.node(leaf)) for _, leaf in tensors]:
            if node in places:
                self._put(leaf, StorageVersion(time, (node,), node, returned_by=(begin, tuple(places.pop(node)))))

    def record_operation(
        self, inputs: Iterable[Any], outputs: Iterable[Any], written: Iterable[Tensor], drawn: bool
    ) -> None:
        """Note an operation."""
        time = self.tick()
        previous = {id(tensor): self.node(tensor) for tensor in written}
        parents = tuple({self.node(leaf) for leaf in inputs if isinstance(leaf, Tensor)})
        storages = {storage_of(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        for tensor in written:
            self._put(tensor, StorageVersion(time, parents, previous[id(tensor)], drawn))
        for leaf in outputs:
            if isinstance(leaf, Tensor) and storage_of(leaf) not in storages:
                self._put(leaf, StorageVersion(time, parents, None, drawn))

    def record_host_read(self, tensors: Iterable[Tensor]) -> None:
        """Note that Python is told numbers."""
        self.host_reads.append((self.tick(), tuple([self.node(tensor) for tensor in tensors])))

    def _put(self, tensor: Tensor, version: StorageVersion) -> int:
        self._latest[storage_of(tensor)] = len(self.nodes), storage_holder(tensor)
        self.nodes.append(version)
        return len(self.nodes) - 1


class _OperationObserver(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention's

    def __init__(self, flow: Flow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flow = flow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # without tags and schema: it reads its arguments, and writes none
            result = func(*args, **kwargs)
            self._flow.record_operation(tensors_in((args, kwargs)), tree_iter(result), [], drawn=False)
            return result
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        states = states_of_torch() if may_draw else []
        written = written_by(func, args, kwargs)
        for tensor in written:
            self._flow.before_write(tensor)
        result = func(*args, **kwargs)
        arguments = tensors_in((args, kwargs))
        outputs = list(tree_iter(result))
        host_reads = _host_reads(func, arguments)
        if host_reads:
            self._flow.record_host_read(host_reads)
        name = func.overloadpacket.__name__
        inputs = [] if name.startswith("new_") or name.endswith("_like") else arguments  # these read shapes alone
        drawn = may_draw and not all(map(torch.equal, states, states_of_torch()))
        self._flow.record_operation(inputs, outputs, written, drawn)
        return result


class _ReadObserver(TorchFunctionMode):
    """Methods that read memory without an operation."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__):
            self._flow.record_host_read(args[:1])
        return func(*args, **(kwargs or {}))


def _host_reads(func: Any, arguments: list[Tensor]) -> list[Tensor]:
    """The arguments whose numbers an operation tells to Python: itself, or by the shape of what it makes."""
    if torch.Tag.dynamic_output_shape in func.tags:
        is_index = func.overloadpacket.__name__ == "index"  # whole numbers choose as many as they are
        return [leaf for leaf in arguments[1:] if leaf.dtype in (torch.bool, torch.uint8)] if is_index else arguments
    return arguments if torch.Tag.data_dependent_output in func.tags else []
