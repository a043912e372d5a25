"""The outline of a model: its own forward, run with stand-ins for its blocks and for what lies in other parts.

    model         embed  [block 0 ... block n-1]  norm   head
    outline       absent [stand-in ... stand-in]  absent absent     no parameters, and no numbers of theirs
    a run         some of the model's modules are put in; the stand-ins hand the hidden state through, and note what
                  they are called with beside it: masks, rotary tables

A module that is absent computes nothing: what it returns is nan, of the shape and type that its copy on the meta device
finds, so whatever would need its numbers is seen. Modules without parameters are there, in eval mode, so that no run of
an outline draws random numbers.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from math import nan
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_leaves, tree_map_only, tree_unflatten

from partition.errors import PartitionError
from partition.names import places_of
from partition.passing import Passing

Leaves: TypeAlias = list[Any]
Key: TypeAlias = "int | str"  # of an argument: its place, or its name
Volatile: TypeAlias = "frozenset[tuple[int, str]]"  # attributes that a forward sets: id of the module, name
_EVERY_MODULE = frozenset(vars(nn.Module()))
_MOST = 32  # calls of which something is remembered


class Shape(NamedTuple):
    """A tensor of which only the shape and the type are known."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Those of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def poison(self, device: torch.device) -> Tensor:
        """A tensor without memory that no numbers may come from: nan, where there is one."""
        return torch.full((), _poison(self.dtype), dtype=self.dtype, device=device).expand(self.shape)


class MadeUp(Tensor):
    """A buffer with numbers that are made up, in the place of one that has none yet. No outline keeps them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain


class UnreadError(PartitionError):
    """The numbers of an input are read where they have not been sent.

    Attributes:
        leaf: which input.
    """

    def __init__(self, leaf: int, name: str, operation: str) -> None:
        super().__init__(
            f"{name} is read after the beginning of the model ({operation}), which it was not with the sample: so its "
            "numbers are not there. Cut the model with a sample that is like this call."
        )
        self.leaf = leaf


class Unread(Tensor):
    """An input of which only the shape has been sent, since its numbers are not read. Reading them is an error."""

    _leaf: int
    _name: str

    @staticmethod
    def __new__(cls, shape: Shape, device: torch.device, leaf: int, name: str) -> Unread:
        made: Unread = Tensor._make_wrapper_subclass(cls, shape.shape, dtype=shape.dtype, device=device)
        made._leaf, made._name = leaf, name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not annotated
        return f"Unread({self._name}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        unread = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Unread))
        if func.is_view or name in _CASTS:
            meta = tree_map_only(Unread, lambda leaf: Shape.of(leaf).poison(torch.device("meta")), (args, kwargs or {}))
            made = func(*meta[0], **{**meta[1], **({"device": "meta"} if "device" in meta[1] else {})})
            device = (kwargs or {}).get("device") or unread.device
            return tree_map_only(
                Tensor, lambda leaf: Unread(Shape.of(leaf), device, unread._leaf, unread._name), made
            )
        if not name.startswith("new_") and not name.endswith("_like"):
            raise UnreadError(unread._leaf, unread._name, name)
        args, kwargs = tree_map_only(Unread, lambda leaf: Shape.of(leaf).poison(leaf.device), (args, kwargs or {}))
        return func(*args, **kwargs)


_CASTS = frozenset({"_to_copy", "clone", "detach", "alias", "lift_fresh"})


class Call:
    """The arguments of a call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def __getitem__(self, key: Key) -> Any:
        return self.kwargs[key] if isinstance(key, str) else self.args[key]

    @property
    def keys(self) -> list[Key]:
        """The arguments."""
        return [*range(len(self.args)), *self.kwargs]

    def replaced(self, others: Iterable[tuple[Key, Any]]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with others in some places; what a block does to a list of them is done to a copy."""
        args, kwargs = renewed([*self.args]), renewed(self.kwargs)
        for key, value in others:
            if isinstance(key, str):
                kwargs[key] = renewed(value)
            else:
                args[key] = renewed(value)
        return args, kwargs


def renewed(value: Any) -> Any:
    """A value with lists, tuples and dicts of its own."""
    if type(value) in (list, tuple):
        return type(value)([renewed(entry) for entry in value])
    if type(value) is dict:
        return {name: renewed(entry) for name, entry in value.items()}
    return value


class Chain(NamedTuple):
    """The way in which the blocks of a model follow each other.

    Attributes:
        blocks: their names in the model.
        entries: which of a block's arguments are the hidden state.
        returned: the leaves of what a block returns, None where there are tensors, and their tree.
        exits: which of them are the hidden state.
        dtypes: of the hidden state that the first block is called with; None where that is no tensor.
        first: the number of its first block among those of all chains.
        kept: which of the first block's arguments are handed to others, too, and cannot be made from the inputs alone:
            what is before the block computes them with parameters.
        carried: for each block which of its arguments is which of these.
    """

    blocks: tuple[str, ...]
    entries: tuple[Key, ...]
    returned: Leaves
    tree: TreeSpec
    exits: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    first: int = 0
    kept: tuple[Key, ...] = ()
    carried: tuple[tuple[tuple[Key, int], ...], ...] = ()

    @property
    def last(self) -> int:
        """The number of its last block."""
        return self.first + len(self.blocks) - 1


class Inputs(NamedTuple):
    """The inputs of the model.

    Attributes:
        names: the keyword arguments; None: one positional argument, or a tuple of them.
        tree: of the arguments.
        always: keyword arguments beside them.
        read: for each leaf whether what follows the first block reads its numbers.
    """

    names: tuple[str, ...] | None
    tree: TreeSpec
    always: Mapping[str, Any]
    read: tuple[bool, ...]

    def leaves(self, x: Any) -> Leaves:
        """The leaves of an input like the sample.

        Raises:
            PartitionError: it is not like it.
        """
        if self.names is not None and isinstance(x, Mapping) and set(x) == set(self.names):
            x = {name: x[name] for name in self.names}
        leaves, tree = tree_flatten(x)
        if tree != self.tree:
            raise PartitionError(
                f"the model was cut for inputs like {_in_words(self.tree, self.names)}; it is called with "
                f"{_in_words(tree, tuple(x) if isinstance(x, Mapping) else None)}. Call it as with the sample, or cut "
                "it with another sample."
            )
        return leaves

    def called(self, leaves: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's forward."""
        x = tree_unflatten(leaves, self.tree)
        return called_with(x, self.always)

    def travelling(self, leaves: Leaves) -> tuple[Any, ...]:
        """The same, as they travel with the hidden state: of tensors that are not read again the shapes."""
        return tuple([leaf if is_read else _written(leaf) for leaf, is_read in zip(leaves, self.read, strict=True)])

    def arrived(self, travelling: tuple[Any, ...], device: torch.device) -> Leaves:
        """The leaves again."""
        return [
            Unread(Shape(leaf[0], getattr(torch, leaf[1])), device, number, self._name(number))
            if isinstance(leaf, tuple) and not is_read else leaf
            for number, (leaf, is_read) in enumerate(zip(travelling, self.read, strict=True))
        ]  # fmt: skip

    def _name(self, number: int) -> str:
        simple = self.names is not None and len(self.names) == len(self.read)
        return f"input {self.names[number]!r}" if simple and self.names else f"tensor {number} of the inputs"


def called_with(x: Any, always: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a value stands for: keyword arguments, several positional ones, or one."""
    if isinstance(x, Mapping):
        return (), {**x, **always}
    return (x if isinstance(x, tuple) else (x,)), dict(always)


class Reached(BaseException):
    """The end of a run at a block. It is no error, and the model does not catch it."""


class Run:
    """One run of an outline.

    Args:
        chains: the blocks.
        end: the number of the block at which it ends; None: it goes on to the end of the model.
        told: by a block's number, what it returns: by place among the leaves. Other leaves are those that it is called
            with, or nan.
        written: by a block's number, what is to stand in some of its arguments: the run goes on with it.
        resume: the number of a block behind which this part begins.
        rewind: called there: what was drawn before was drawn by another part.

    Attributes:
        calls: of the blocks that were reached, in order.
    """

    def __init__(
        self,
        chains: Sequence[Chain],
        end: int | None,
        told: Mapping[int, Mapping[int, Any]] = MappingProxyType({}),
        written: Mapping[int, Mapping[Key, Any]] = MappingProxyType({}),
        resume: int | None = None,
        rewind: Callable[[], object] = int,
    ) -> None:
        self.calls: list[Call] = []
        self._chains = chains
        self._end = end
        self._told = told
        self._known = {id(leaf) for leaves in told.values() for leaf in leaves.values()}
        self._written = written
        self._resume = resume
        self._rewind = rewind

    def spare(self, own: Iterable[Any]) -> None:
        """Write into none of these: what a part has is there."""
        self._known.update([id(tensor) for tensor in own if isinstance(tensor, Tensor)])

    def reach(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], absent: Absent | None) -> Any:
        """The output of the block of this number.

        Args:
            number: of the block.
            args: that it is called with.
            kwargs: that it is called with.
            absent: what returns nan in the shapes of its output. None: its output is its hidden state, in the shape
                that it is called with; or nothing but blocks sees it.
        """
        if number != len(self.calls):
            raise PartitionError(f"block {number} of the model was called after {len(self.calls)} others.")
        call = Call(args, kwargs)
        self.calls.append(call)
        if number == self._end:
            raise Reached
        for key, value in self._written.get(number, {}).items():
            for lost, tensor in zip(tree_leaves(call[key]), tree_leaves(value), strict=True):
                if isinstance(lost, Tensor) and _is_computed(lost) and id(lost) not in self._known:
                    lost.copy_(tensor)
        if number == self._resume:
            self._rewind()
        chain = chain_of(self._chains, number)
        told = self._told.get(number, {})
        leaves = list(chain.returned)
        if absent is None:
            for place, key in zip(chain.exits, chain.entries, strict=True):
                leaves[place] = call[key]
        elif any(leaf is None and place not in told for place, leaf in enumerate(leaves)):
            leaves = tree_leaves(absent(*args, **kwargs))
        for place, leaf in told.items():
            leaves[place] = leaf
        return tree_unflatten(leaves, chain.tree)


def around(chains: Iterable[Chain]) -> set[str]:
    """The names of the modules that contain blocks."""
    blocks = [name.split(".") for chain in chains for name in chain.blocks]
    return {".".join(steps[:length]) for steps in blocks for length in range(len(steps))}


def chain_of(chains: Iterable[Chain], number: int) -> Chain:
    """The chain of a block."""
    for chain in chains:  # in order
        if number < chain.first + len(chain.blocks):
            return chain
    raise AssertionError(number)  # there is such a block


_run: ContextVar[Run] = ContextVar("run")


class Shadow(nn.Module):
    """A module with the attributes of another, and with parameters of their types, but nan.

    Args:
        module: the other module.
        volatile: the attributes that a forward sets, which would be those of another call; it has none of them.
    """

    def __init__(self, module: nn.Module, volatile: Volatile) -> None:
        super().__init__()
        self.shadow = rebuilt(module, lambda tensor: Shape.of(tensor).poison(tensor.device), volatile)

    def __getattr__(self, name: str) -> Any:
        shadow = vars(self)["_modules"]["shadow"]
        return shadow if name == "shadow" else getattr(shadow, name)

    def __getitem__(self, index: Any) -> Any:
        return self.shadow[index]  # type: ignore[index]  # of a ModuleList, a ParameterDict

    def __iter__(self) -> Iterator[Any]:
        yield from self.shadow  # type: ignore[misc]


class StandIn(Shadow):
    """A stand-in for a block.

    Args:
        block: the block.
        number: its number.
        volatile: the attributes that a forward sets.
        is_shaping: whether it returns more than the hidden state, in another shape than it is called with, say.
    """

    def __init__(self, block: nn.Module, number: int, volatile: Volatile, is_shaping: bool) -> None:
        super().__init__(block, volatile)
        self._stands_for = (number, Absent(block, volatile) if is_shaping else None)  # not as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        number, absent = self._stands_for
        return _run.get().reach(number, args, kwargs, absent)

    __call__ = forward  # it has no hooks


class Absent(Shadow):
    """A stand-in for a module that lies in another part: nan, of the shapes that it would return.

    Args:
        module: the module.
        volatile: the attributes that a forward sets.
    """

    def __init__(self, module: nn.Module, volatile: Volatile) -> None:
        super().__init__(module, volatile)
        self._on_meta = (rebuilt(module, lambda tensor: tensor.detach().to("meta"), volatile).eval(),)  # not as a child
        self._known: OrderedDict[str, Any] = OrderedDict()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)  # as a rule: ids of an embedding, say
        leaves, tree = (args, None) if is_plain else tree_flatten((args, kwargs))
        shapes = [Shape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        autocast = _autocast(device)
        key = repr((tree, shapes, autocast))
        if key not in self._known:
            place = device if any(autocast) else torch.device("meta")  # where autocast does not come to
            here = [shape.poison(place) if isinstance(shape, Shape) else shape for shape in shapes]
            self._known[key] = self._shapes(place, *((here, {}) if tree is None else tree_unflatten(here, tree)))
            _forget(self._known)
        known = self._known[key]
        return _lost(known, device) if isinstance(known, Tensor) else tree_map_only(
            Tensor, lambda meta: _lost(meta, device), known
        )

    def _shapes(self, place: torch.device, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of the module, on the meta device."""
        module = rebuilt(vars(self)["_on_meta"][0], lambda tensor: Shape.of(tensor).poison(place))
        with torch.no_grad():
            return tree_map_only(Tensor, lambda leaf: leaf.to("meta"), module(*args, **kwargs))


class _Made(NamedTuple):
    """The arguments of blocks.

    Attributes:
        inputs: the tensors that they were made from.
        calls: the arguments, by a block's number.
        tensors, versions: all that is in them and has a version, as it was made.
    """

    inputs: list[weakref.ref[Tensor]]
    calls: list[Call]
    tensors: list[Tensor]
    versions: list[int]


class _Memory:
    """The arguments of blocks that were made from inputs. It is no module, so no one takes it for the state of one."""

    def __init__(self) -> None:
        self.made: OrderedDict[Any, _Made] = OrderedDict()
        self.lock = threading.Lock()


class Outline(nn.Module):
    """The outline of a model.

    It is a module so that it may hang on another one as an attribute without being a part of it.

    Args:
        model: the model.
        chains: its blocks.
        inputs: what it is called with.
        apart: the names of the modules that lie in parts, beside the blocks.
        volatile: the attributes that a forward sets.
        passing: the values that pass blocks by.
        shaping: the numbers of the blocks that are asked for the shapes of what they return.
    """

    def __init__(
        self,
        model: nn.Module,
        chains: tuple[Chain, ...],
        inputs: Inputs,
        apart: Iterable[str],
        volatile: Volatile,
        passing: Passing = Passing(),
        shaping: Container[int] = (),
    ) -> None:
        super().__init__()
        self.chains = chains
        self.inputs = inputs
        self.passing = passing
        self.places = places_of(model)
        blocks = [name for chain in chains for name in chain.blocks]
        replaced: dict[str, nn.Module] = {
            name: StandIn(model.get_submodule(name), number, volatile, number in shaping)
            for number, name in enumerate(blocks)
        }
        replaced.update({name: Absent(model.get_submodule(name), volatile) for name in apart})
        containers = around(chains)
        self._containers_of_blocks = sorted(containers)
        self._roots: dict[torch.device | None, nn.Module] = {None: _outlined(model, replaced, containers, "", volatile)}
        self._memory = _Memory()

    def __deepcopy__(self, memo: Any) -> Outline:
        """It holds nothing of a part: copies of parts share it."""
        return self

    def alone(self) -> Outline:
        """The same outline, which keeps nothing where this one would find it."""
        made: Outline = shallow(self)  # type: ignore[assignment]  # of the same type
        vars(made).update(_roots={None: self._roots[None]}, _memory=_Memory())
        return made

    def run(
        self, run: Run, leaves: Leaves, device: torch.device, own: Mapping[str, Any], training: bool = False
    ) -> Any:
        """Run the model's forward.

        Args:
            run: what the blocks do.
            leaves: of the inputs.
            device: where it computes.
            own: the modules and parameters that are there, by their names in the model.
            training: the mode of the modules that contain others.

        Returns:
            What the model returns; None where the run ended at a block.
        """
        root = _put_in(self._on(device), own, self._containers_of_blocks, training)
        run.spare(own.values())
        args, kwargs = self.inputs.called(leaves)
        token = _run.set(run)
        try:
            return root.forward(*args, **kwargs)
        except Reached:
            return None
        finally:
            _run.reset(token)

    def call(
        self, number: int, hidden: tuple[Any, ...], kept: tuple[Any, ...], travelling: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a block: args, kwargs."""
        chain, device = chain_of(self.chains, number), next(leaf.device for leaf in hidden if leaf is not None)
        carried = [(key, kept[index]) for key, index in chain.carried[number - chain.first]]
        call = self.beside(number, device, travelling)
        return call.replaced([*zip(chain.entries, hidden, strict=True), *carried])

    def beside(self, number: int, device: torch.device, travelling: tuple[Any, ...]) -> Call:
        """The arguments of a block, with nan where the hidden state goes.

        One run finds it for all blocks of a chain. It is kept as long as the inputs live from which it was made.
        """
        end = chain_of(self.chains, number).last
        tensors = [leaf for leaf in travelling if isinstance(leaf, Tensor)]
        # In the thread and stream where it was made, it is ready.
        key = (
            end, device, threading.get_ident(), _stream(device), torch.is_inference_mode_enabled(), _autocast(device),
            *[(id(leaf), _version(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in travelling],
        )  # fmt: skip
        made = self._memory.made.get(key)
        if made is not None and all([one() is other for one, other in zip(made.inputs, tensors, strict=True)]):
            if made.versions != [tensor._version for tensor in made.tensors]:
                raise PartitionError(
                    "a block has written into a tensor that the model hands to several blocks. What comes later would "
                    "depend on which blocks share a stage; write to a copy."
                )
            return made.calls[number]
        run = Run(self.chains, end)
        with torch.no_grad():
            self.run(run, self.inputs.arrived(travelling, device), device, {})
        forget = partial(self._memory.made.pop, key, None)
        made_from = [weakref.ref(tensor, lambda _: forget()) for tensor in tensors]
        leaves = [leaf for call in run.calls for leaf in tree_leaves((call.args, call.kwargs))]
        counted = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()}
        versions = [leaf._version for leaf in counted.values()]
        with self._memory.lock:
            self._memory.made[key] = _Made(made_from, run.calls, list(counted.values()), versions)
            _forget(self._memory.made)
        return run.calls[number]

    def _on(self, device: torch.device) -> nn.Module:
        """The root, with its buffers on a device."""
        if device not in self._roots:
            self._roots[device] = rebuilt(self._roots[None], lambda tensor: _moved(tensor, device))
        return self._roots[device]


def rebuilt(
    module: nn.Module, changed: Callable[[Tensor], Tensor], volatile: Volatile = frozenset()
) -> nn.Module:
    """A copy of a module with other parameters and buffers, without what is `volatile`; it shares all else."""
    made = shallow(module, volatile)
    for table in ("_parameters", "_buffers"):
        tensors = vars(module)[table].items()
        vars(made)[table] = {name: each if each is None else changed(each) for name, each in tensors}
    vars(made)["_modules"] = {
        name: child if child is None else rebuilt(child, changed, volatile) for name, child in module._modules.items()
    }
    return made


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; without memory there where it has none here."""
    return Shape.of(tensor).poison(device) if _is_without_memory(tensor) else tensor.to(device)


def shallow(module: nn.Module, volatile: Volatile = frozenset()) -> nn.Module:
    """A copy of a module that shares its parameters, buffers and children, in tables of its own."""
    made: nn.Module = object.__new__(type(module))
    own = vars(made)
    own.update(vars(module))
    for name in [name for owner, name in volatile if owner == id(module)]:
        own.pop(name, None)
    for table in ("_parameters", "_buffers", "_modules"):
        own[table] = own[table].copy()
    own.pop("forward", None)  # it is bound to the other
    return made


def _outlined(
    module: nn.Module, replaced: Mapping[str, nn.Module], containers: set[str], name: str, volatile: Volatile
) -> nn.Module:
    made = shallow(module, volatile)
    vars(made)["training"] = False
    vars(made)["_parameters"] = {
        key: None if each is None else Shape.of(each).poison(each.device)
        for key, each in module._parameters.items()
    }
    vars(made)["_buffers"] = {
        key: Shape.of(each).poison(each.device) if isinstance(each, MadeUp) else each
        for key, each in module._buffers.items()
    }
    for key in [key for key, value in vars(made).items() if key not in _EVERY_MODULE and _holds_parameters(value)]:
        del vars(made)[key]  # they would be those of when the model was cut
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if path in replaced:
            made._modules[key] = replaced[path]
        elif child is not None and path in containers:
            made._modules[key] = _outlined(child, replaced, containers, path, volatile)
        elif child is not None:
            made._modules[key] = copy.deepcopy(child).eval()
    return made


def _put_in(root: nn.Module, own: Mapping[str, Any], containers: list[str], training: bool) -> nn.Module:
    """The root with some modules and parameters put in, and copies of what contains them: the containers of blocks."""
    copies = {"": shallow(root)}
    for name in containers[1:]:  # each after the one that it is in
        above, _, key = name.rpartition(".")
        table = copies[above]._modules
        copies[name] = table[key] = shallow(table[key])  # type: ignore[arg-type]  # it contains blocks
    for made in copies.values():
        vars(made)["training"] = training
    for name, each in own.items():
        above, _, key = name.rpartition(".")
        tables = [vars(copies[above])[table] for table in ("_parameters", "_buffers", "_modules")]
        next(table for table in tables if key in table)[key] = each
    return copies[""]


def _holds_parameters(value: Any) -> bool:
    """Whether an attribute holds parameters, or modules that may have some."""
    return any(isinstance(leaf, nn.Parameter | nn.Module) for leaf in tree_leaves(value))


def _is_computed(tensor: Tensor) -> bool:
    """Whether it was computed in this run: it is no parameter, be it there or absent, which is no part's to write."""
    is_leaf = isinstance(tensor, nn.Parameter) or tensor.is_leaf and tensor.requires_grad
    return not _is_without_memory(tensor) and not is_leaf


def _is_without_memory(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _written(leaf: Tensor) -> tuple[tuple[int, ...], str]:
    """The shape and type of a tensor, as they travel."""
    return tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")


def _lost(meta: Tensor, device: torch.device) -> Tensor:
    """A tensor like one on the meta device, whose numbers no part may need."""
    return torch.full(meta.shape, _poison(meta.dtype), dtype=meta.dtype, device=device)


def _poison(dtype: torch.dtype) -> float:
    return nan if dtype.is_floating_point or dtype.is_complex else 0


def _stream(device: torch.device) -> int:
    return 0 if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device).stream_id


def _autocast(device: torch.device) -> tuple[torch.dtype | None, ...]:
    """The types that autocast computes in, on the CPU and on a device."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    return tuple([torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds])


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _forget(known: OrderedDict[Any, Any]) -> None:
    while len(known) > _MOST:
        known.popitem(last=False)


def _in_words(tree: TreeSpec, names: tuple[str, ...] | None) -> str:
    if names is not None:
        return "a dict of " + (", ".join(map(str, names)) or "nothing")
    return f"a {tree.type.__name__} of {tree.num_leaves}" if tree.num_children else "one tensor"
