"""Runs of a model's own forward in which its blocks are stood in for, and how its blocks follow each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_unflatten

from partition.contents import PLAIN, storage_of, tensors_in, version_of
from partition.models.inputs import Leaves, UnlikeSampleError, UnsentInput, UnsentInputError
from partition.models.lost import LostTensor, another, filled, is_lost, lost
from partition.models.shapes import is_without_memory
from partition.opaque import may_change

ArgumentKey: TypeAlias = "tuple[int | str, int]"  # an argument, by its place or its name; and a place among its leaves


class Switches(NamedTuple):
    """The switches of torch that a model may change around its blocks, for one thread."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # by type of device; nothing where it is on nowhere

    @classmethod
    def now(cls) -> Switches:
        """Those that are on."""
        if not torch._C._is_any_autocast_enabled():
            return cls(torch.is_grad_enabled(), ())
        kinds = ("cpu", *_accelerators())
        return cls(torch.is_grad_enabled(), tuple([
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        ]))  # fmt: skip

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within: these are on."""
        off = [(kind, False, dtype) for kind, _, dtype in Switches.now().autocast]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, is_on, dtype in self.autocast or off:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            yield


def _accelerators() -> tuple[str, ...]:
    kind = torch.accelerator.current_accelerator()
    return () if kind is None else (kind.type,)


class CallArguments:
    """The arguments of a call, and the switches with which it is made.

    A key leads to a leaf of an argument: (0, 1) to b of call((a, b)), ("mask", 0) to m of call(mask=m).

    Attributes:
        args, kwargs: the arguments.
        switches: whether gradients are on, and what autocast computes in: the model may change them around its blocks.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = renewed(args), renewed(kwargs)  # the model may set other entries for the next block
        self.switches = Switches.now()

    def __getitem__(self, key: ArgumentKey) -> Any:
        argument, place = key
        value = self._argument(argument)
        return value if isinstance(value, Tensor) else _leaves_of(argument, value, place)[0][place]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all arguments."""
        return tensors_in([*self.args, *self.kwargs.values()])

    @property
    def may_change(self) -> bool:
        """Whether a block may write into an object that it is called with."""
        values = [value for value in (*self.args, *self.kwargs.values()) if _is_renewed(value)]
        return any(map(may_change, tree_leaves(values)))

    def is_argument(self, key: ArgumentKey) -> bool:
        """Whether a key leads to an argument itself, and not to a part of one."""
        return self[key] is self._argument(key[0])

    def _argument(self, name: int | str) -> Any:
        try:
            return self.kwargs[name] if isinstance(name, str) else self.args[name]
        except LookupError:
            raise UnlikeSampleError(f"a block is called without argument {name!r}, with which it was called") from None

    @property
    def leaves(self) -> dict[ArgumentKey, Any]:
        """The leaves of all arguments."""
        arguments: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {(name, place): leaf for name, value in arguments for place, leaf in enumerate(tree_leaves(value))}

    def replaced(self, others: Iterable[tuple[ArgumentKey, Any]]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with other leaves in some places; what a block does to a list of them is done to a copy."""
        args, kwargs = renewed([*self.args]), renewed(self.kwargs)
        for (argument, place), leaf in others:
            table: Any = kwargs if isinstance(argument, str) else args
            if not isinstance(table[argument], Tensor):
                leaves, tree = _leaves_of(argument, table[argument], place)
                leaves[place] = leaf
                leaf = tree_unflatten(leaves, tree)
            table[argument] = leaf
        return args, kwargs

    def without(self, keys: Iterable[ArgumentKey]) -> CallArguments:
        """The same call, with nothing in some places."""
        call: CallArguments = object.__new__(CallArguments)
        args, call.kwargs = self.replaced([(key, _NOTHING) for key in keys])
        call.args, call.switches = tuple(args), self.switches
        return call


_NOTHING = torch.empty(0, device="cpu")


def _leaves_of(argument: int | str, value: Any, place: int) -> tuple[Leaves, TreeSpec]:
    """The leaves of an argument, among them the one at a place, and their tree.

    Raises:
        PartitionError: there is none.
    """
    leaves, tree = tree_flatten(value)
    if place >= len(leaves):
        raise UnlikeSampleError(
            f"argument {argument!r} of a block holds {len(leaves)} values, and held {place + 1} or more",
            "What blocks put into a list that they are called with, let them return. ",
        )
    return leaves, tree


def renewed(value: Any) -> Any:
    """A value with containers of its own."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([renewed(entry) if _is_renewed(entry) else entry for entry in value])
    if kind is dict:
        return {name: renewed(entry) if _is_renewed(entry) else entry for name, entry in value.items()}
    return value if tree_is_leaf(value) else tree_map(renewed, value)


def _is_renewed(entry: Any) -> bool:
    return type(entry) not in PLAIN and not isinstance(entry, Tensor)


class BlockChain(NamedTuple):
    """The way in which the blocks of a model follow each other.

    Attributes:
        blocks: their names in the model, the same where a module is called again.
        entries: which leaves of a block's arguments are the hidden state.
        returned: what is seen of the leaves of what a block returns, and their tree: see `partition.opaque.seen_of`.
        exits: which of them are the hidden state.
        dtypes: of the hidden state that the first block is called with; None where it is no floating-point tensor.
        first: the number of its first block among those of all chains.
    """

    blocks: tuple[str, ...]
    entries: tuple[ArgumentKey, ...]
    returned: Leaves
    tree: TreeSpec
    exits: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    first: int = 0

    @property
    def last(self) -> int:
        """The number of its last block."""
        return self.first + len(self.blocks) - 1

    def leaves(self, number: int, returned: Any) -> Leaves:
        """The leaves of what a block returned.

        Raises:
            PartitionError: they lie in other containers than on the sample.
        """
        leaves, tree = tree_flatten(returned)
        if tree != self.tree:
            raise UnlikeSampleError(
                f"block {self.blocks[number - self.first]!r} returned other containers than",
                "Names of entries, and their order, count as well. ",
            )
        return leaves


class OutlineRunEnd(BaseException):
    """The end of a run at a block. It is no error, and the model does not catch it."""


class OutlineRun:
    """One run of an outline.

    Args:
        chains: the blocks.
        end: the number of the block at which it ends; None: it goes on to the end of the model.
        values: by a block's number and a place among the leaves, what it returns: other leaves are those that it is
            called with, or nan. By its number and a key, what is to stand in an argument: the run goes on with it.
        resume: the number of a block behind which this part begins.
        rewind: called there: what was drawn before was drawn by another part.

    Attributes:
        calls: of the blocks that were reached, in order.
        versions: of the tensors of their arguments, as the blocks were called, where no values arrive.
    """

    def __init__(
        self,
        chains: Sequence[BlockChain],
        end: int | None,
        values: Mapping[tuple[int, int | ArgumentKey], Any] = MappingProxyType({}),
        resume: int | None = None,
        rewind: Callable[[], object] = int,
    ) -> None:
        self.calls: list[CallArguments] = []
        self.versions: list[int] = []
        self._chains = chains
        self._end = end
        self._values: dict[int, dict[int | ArgumentKey, Any]] = defaultdict(dict)
        for (number, place), value in values.items():
            self._values[number][place] = value
        arrived = [leaf for (_, place), leaf in values.items() if isinstance(place, int) and isinstance(leaf, Tensor)]
        self._spared = set(map(storage_of, arrived))  # the storages into which it writes nothing
        self._resume = resume
        self._rewind = rewind
        self._filled = set[int]()  # storages
        self._hidden: list[tuple[Any, int]] = []  # by the last block that was reached: its hidden state, and versions

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within: it is the run under way."""
        run, storages = this_run.set(self), filled.set(self._filled)
        try:
            yield
        finally:
            this_run.reset(run)
            filled.reset(storages)

    def here(self, value: Any, where: str) -> Any:
        """A value that leaves the run.

        Raises:
            PartitionError: it was computed in another part, or from such a value, and has not arrived; or is an input
                that was not sent.
        """
        if isinstance(value, UnsentInput):
            raise UnsentInputError(value._leaf, value._name, where)
        if not isinstance(value, LostTensor):
            return value
        with self.entered(), torch._C.DisableTorchFunctionSubclass():
            if is_lost(value):
                raise UnlikeSampleError(
                    f"{where} is computed from what another part of the model computes, as it was not",
                    "That does not travel there. ",
                )
            return value.as_subclass(Tensor)

    def spare(self, entries: Iterable[Any]) -> None:
        """Write into none of these, modules and tensors: what a part has is there, and inputs are the caller's."""
        if any([isinstance(place, tuple) for given in self._values.values() for place in given]):
            entries = list(entries)
            modules = [entry for entry in entries if isinstance(entry, nn.Module)]
            tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
            self._spared.update([storage_of(entry) for entry in (*entries, *tensors) if isinstance(entry, Tensor)])

    def reach(
        self, numbers: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any], absent: Callable[..., Any] | None
    ) -> Any:
        """The output of a block.

        Args:
            numbers: of the block: its calls, in order.
            args: that it is called with.
            kwargs: that it is called with.
            absent: what returns nan in the shapes of its output. None: its output is its hidden state, in the shape
                that it is called with; or nothing but blocks sees it, and other tensors have that shape, too.
        """
        number = len(self.calls)
        if number not in numbers:
            names = [name for chain in self._chains for name in chain.blocks]
            where = f"where {names[number]!r} was" if number < len(names) else "once more than it was"
            raise UnlikeSampleError(
                f"block {names[numbers[0]]!r} was called {where}",
                "Turn off what drops layers at random (layerdrop=0). ",
            )
        call = CallArguments(args, kwargs)
        chain = chain_of(self._chains, number)
        if number > chain.first:
            self._check_hidden(number, [call[key] for key in chain.entries])
        self.calls.append(call)
        if not self._values:
            with torch._C.DisableTorchFunctionSubclass():
                self.versions += map(version_of, call.tensors)
        if number == self._end:
            raise OutlineRunEnd
        given = self._values.get(number, _NO_VALUES)
        arguments = {key: value for key, value in given.items() if isinstance(key, tuple)}
        outputs = {place: value for place, value in given.items() if isinstance(place, int)}
        for key, tensor in arguments.items():
            argument = call[key]
            # None where it was decided otherwise
            are_tensors = isinstance(argument, Tensor) and isinstance(tensor, Tensor)
            if are_tensors and not is_without_memory(argument) and storage_of(argument) not in self._spared:
                with torch.set_grad_enabled(tensor.requires_grad):  # the model may call the block without gradients
                    _overwrite(argument, tensor)
                self._filled.add(storage_of(argument))
        if number == self._resume:
            self._rewind()
        leaves = list(chain.returned)
        if absent is None:
            for place, key in zip(chain.exits, chain.entries, strict=True):
                leaves[place] = hidden = call[key]
                if isinstance(hidden, Tensor):  # the numbers of the first one may be here
                    leaves[place] = lost(hidden, hidden.device) if number == chain.first else another(hidden)
            states = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            for place, leaf in enumerate(leaves):
                if leaf is Tensor and states:
                    leaves[place] = another(states[0])
        elif any(leaf is Tensor and place not in outputs for place, leaf in enumerate(leaves)):
            leaves = chain.leaves(number, absent(*args, **kwargs))
        for place, leaf in outputs.items():
            leaves[place] = leaf
        with torch._C.DisableTorchFunctionSubclass():
            self._hidden = [(leaves[place], version_of(leaves[place])) for place in chain.exits]
        return leaves[0] if chain.tree.is_leaf() else tree_unflatten(leaves, chain.tree)

    def _check_hidden(self, number: int, hidden: Sequence[Any]) -> None:
        """See that a block is called with what the one before it in its chain returned.

        Raises:
            PartitionError: the model computes something between the two, which it did not on the sample.
        """
        with torch._C.DisableTorchFunctionSubclass():
            versions = list(map(version_of, hidden))
        for (output, version), leaf, now in zip(self._hidden, hidden, versions, strict=True):
            if leaf is not output or now != version:
                names = [name for chain in self._chains for name in chain.blocks]
                raise UnlikeSampleError(
                    f"block {names[number]!r} is not called with what block {names[number - 1]!r} returned, as it was",
                    "Something is computed between the two, for a mask, a size or a mode. (The model's own checkpoint "
                    "with use_reentrant=True hands on copies: use False.) ",
                )


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names of each module, by its id."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    return names


def numbers_of(model: nn.Module, chains: Iterable[BlockChain]) -> dict[str, tuple[int, ...]]:
    """The numbers of each module that is a block, several where it is called several times, by all its names."""
    names = names_of(model)
    numbers: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for number, block in enumerate([name for chain in chains for name in chain.blocks]):
        for name in names[id(model.get_submodule(block))]:
            numbers[name] += (number,)
    return numbers


def containers_of(model: nn.Module, chains: Iterable[BlockChain]) -> set[str]:
    """The names of the modules that contain blocks."""
    blocks = [name.split(".") for name in numbers_of(model, chains)]
    return {".".join(steps[:length]) for steps in blocks for length in range(len(steps))}


def chain_of(chains: Iterable[BlockChain], number: int) -> BlockChain:
    """The chain of a block."""
    for chain in chains:  # in order
        if number < chain.first + len(chain.blocks):
            return chain
    raise AssertionError(number)  # there is such a block


this_run: ContextVar[OutlineRun] = ContextVar("run")
_NO_VALUES: Mapping[int | ArgumentKey, Any] = MappingProxyType({})


def _overwrite(target: Tensor, source: Tensor) -> None:
    """Copy numbers into a tensor whose own were computed from nan, and to which no gradient goes: 0 * nan is nan."""
    with torch._C.DisableTorchFunctionSubclass():
        base = target if target._base is None else target._base
        if base.grad_fn is not None:
            base.detach_()
        view = base.as_strided(target.size(), target.stride(), target.storage_offset())  # `target` may not know of that
        index = tuple([slice(None) if stride else slice(1) for stride in target.stride()])  # expanded: each once
        view[index].copy_(source[index])
