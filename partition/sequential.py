"""A model that is a beginning, a run of blocks and an end, as an nn.Sequential of its own modules.

    model, sample ─► runs, watched ─► Chain: blocks that hand a hidden state on ─► Outline, Beginning, Block ..., End
                                     └─► what is called and read before, between and after them
    compared with the model on the sample: outputs, gradients, what each block is called with

Nothing is traced: each part runs the model's own forward (`partition.outline`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter

from partition.errors import PartitionError
from partition.outline import Chain, Inputs, Leaves, Outline, UnreadError, called_with, rebuilt
from partition.parts import Beginning, Block, End

BEFORE, WITHIN, AFTER = range(3)


def to_sequential(
    model: nn.Module,
    sample: Any,
    *,
    blocks: str | Sequence[str] | None = None,
    output: Callable[[Any], Any] | None = None,
) -> nn.Sequential:
    """A model as an nn.Sequential of its beginning, its blocks and its end, which a Pipe can cut.

    The layers hold the model's own modules and parameters: what trains the one trains the other, and
    `model.state_dict()` or `model.save_pretrained(...)` saves it. The names are those of the model behind the number of
    the layer: "3.model.layers.2.mlp.up_proj.weight".

    The model's own forward is run in each part, with its blocks replaced. Before it is returned, the nn.Sequential is
    compared with the model on the sample in eval mode: outputs to the bit, gradients nearly.

    Args:
        model: any module that calls one block after the other, each on what the one before returned. Models of Hugging
            Face's transformers are called with `use_cache=False`.
        sample: what it is called with: a dict of keyword arguments, a tuple of positional ones, or a tensor; rows along
            dim 0. Afterwards the nn.Sequential, or a Pipe, is called with one such value.
        blocks: the names of the blocks, or of modules whose children they are, in order. None: the longest chain.
        output: what to make of what the model returns. None: a mapping becomes a dict of its entries that are not None.

    Returns:
        Layers: the beginning, each block, the end.

    Raises:
        TypeError: `model` is no module.
        PartitionError: it is no such model. The words name the block, and what stands in the way.

    Example:
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        ...         self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...     def forward(self, ids):
        ...         x = self.embed(ids)
        ...         for block in self.blocks:
        ...             x = block(x)
        ...         return self.head(x)
        >>> model, ids = Model(), torch.arange(10).view(2, 5)
        >>> layers = to_sequential(model, ids)
        >>> len(layers), torch.equal(layers(ids), model(ids))
        (5, True)
        >>> [name for name, _ in layers.named_parameters()][:2]
        ['0.embed.weight', '1.blocks.0.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    sample = dict(sample) if isinstance(sample, Mapping) else sample
    make = output or _plain
    always = _always(model, sample)
    with _in_eval_mode(model), torch.random.fork_rng():
        seen = _watched(model, sample, always, blocks)
        read = tuple([not isinstance(leaf, Tensor) for leaf in tree_flatten(sample)[0]])
        inputs = Inputs(seen.names, seen.tree, always, read)
        first, last, apart = _shares(model, seen)
        try:
            chain = _carrying(Outline(model, seen.chain, inputs, apart), sample, seen)
            layers = None
            while layers is None:
                layers = _layers(model, Outline(model, chain, inputs, apart), first, last, make)
                try:
                    _compare(model, layers, sample, always, make)
                except UnreadError as error:
                    read = tuple([is_read or number == error.leaf for number, is_read in enumerate(inputs.read)])
                    inputs, layers = inputs._replace(read=read), None
        except PartitionError:
            raise
        except Exception as error:
            raise PartitionError(
                f"{type(model).__name__}'s forward does not run without its blocks: {type(error).__name__}: {error}. "
                "Cut it by hand, as an nn.Sequential."
            ) from error
    for layer in layers:
        vars(layer)["training"] = model.training
    return layers


def _layers(
    model: nn.Module, outline: Outline, first: Mapping[str, Any], last: Mapping[str, Any], make: Callable[[Any], Any]
) -> nn.Sequential:
    again = {
        name: _sharing(each) if name in first and isinstance(each, nn.Module) else each for name, each in last.items()
    }
    chain = outline.chain
    middle = [Block(outline, number, model.get_submodule(name)) for number, name in enumerate(chain.blocks)]
    return nn.Sequential(Beginning(outline, first), *middle, End(outline, again, make))


def _sharing(module: nn.Module) -> nn.Module:
    """Another module with the same parameters: both ends of the model hold it."""
    return rebuilt(module, lambda tensor: tensor)


# ------------------------------------------------------------------------------------------------------- one run


class Seen(NamedTuple):
    """The findings of a few runs of the model."""

    names: tuple[str, ...] | None
    tree: TreeSpec
    chain: Chain
    calls: list[tuple[Leaves, TreeSpec]]  # of the blocks
    called: dict[str, set[int]]  # the phases in which a module was called, by its name
    read: dict[int, set[int]]  # the phases in which a storage was read


class _Called(NamedTuple):
    name: str
    begin: int
    end: int
    given: tuple[Leaves, TreeSpec]
    returned: tuple[Leaves, TreeSpec]


def _watched(
    model: nn.Module, sample: Any, always: Mapping[str, Any], blocks: str | Sequence[str] | None
) -> Seen:
    """Run the model twice: for the chain of its blocks; for what is used before and after them."""
    calls = _all_calls(model, sample, always)
    names = _chosen(model, calls, blocks)
    by_name = {call.name: call for call in calls if call.name in set(names)}
    chain = _chain(names, [by_name[name] for name in names])
    called, read = _phases(model, sample, always, names)
    keys = tuple(sample) if isinstance(sample, Mapping) else None
    return Seen(keys, tree_flatten(sample)[1], chain, [by_name[name].given for name in names], called, read)


def _all_calls(model: nn.Module, sample: Any, always: Mapping[str, Any]) -> list[_Called]:
    """Every call of a module within the model, in the order in which they began."""
    found: list[_Called] = []
    clock = iter(range(10**9))
    open_calls: list[tuple[int, tuple[Leaves, TreeSpec]]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        open_calls.append((next(clock), tree_flatten((args, kwargs))))

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            begin, given = open_calls.pop()
            found.append(_Called(name, begin, next(clock), given, tree_flatten(returned)))

        return note

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(name), with_kwargs=True).remove)
        _call(model, sample, always)
    return sorted(found, key=lambda call: call.begin)


def _chosen(model: nn.Module, calls: Sequence[_Called], blocks: str | Sequence[str] | None) -> list[str]:
    """The names of the blocks."""
    times = Counter(call.name for call in calls)
    by_name = {call.name: call for call in calls if times[call.name] == 1}
    if blocks is not None:
        names = _named(model, [blocks] if isinstance(blocks, str) else list(blocks), by_name)
        for name in names:
            if name not in by_name:
                raise PartitionError(f"block {name!r} is called {times[name]} times in a forward, and must be once.")
        return names
    runs = []
    for name, module in model.named_modules():
        children = [f"{name}.{key}" if name else key for key in module._modules]
        run = [by_name[child] for child in children if child in by_name]
        if len(run) == len(children) > 1 and run == sorted(run, key=lambda call: call.begin) and _follow(run):
            runs.append(run)
    alike = [run for run in runs if len({type(model.get_submodule(call.name)) for call in run}) == 1]
    chains = [_continued(run, alike or runs) for run in alike or runs]
    if not chains:
        raise PartitionError(
            f"{type(model).__name__} has no chain of blocks: no module whose children are called once each, one after "
            "the other, each with what the one before returned. Name them, blocks=[...], or write the model as an "
            "nn.Sequential."
        )
    return [call.name for call in max(chains, key=lambda run: _size(model, run))]


def _continued(run: Sequence[_Called], runs: Sequence[Sequence[_Called]]) -> list[_Called]:
    """A run, and those that follow it: the blocks of the next resolution, say."""
    whole = list(run)
    for other in sorted(runs, key=lambda each: each[0].begin):
        if other[0].begin > whole[-1].end and _follow([whole[-1], other[0]]):
            whole += other
    return whole


def _named(model: nn.Module, given: Iterable[str], by_name: Mapping[str, _Called]) -> list[str]:
    names = []
    known = dict(model.named_modules())
    for name in given:
        if name not in known:
            raise PartitionError(f"blocks: {type(model).__name__} has no module {name!r}.")
        module = known[name]
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            names += [f"{name}.{key}" for key in module._modules]
        else:
            names.append(name)
    return names


def _size(model: nn.Module, run: Sequence[_Called]) -> int:
    return sum(parameter.numel() for call in run for parameter in model.get_submodule(call.name).parameters())


def _follow(run: Sequence[_Called]) -> bool:
    """Whether each is called with something that the one before returned."""
    return all(_shared(one, other) for one, other in zip(run, run[1:], strict=False))


def _shared(one: _Called, other: _Called) -> list[tuple[int, int]]:
    """The leaves of what one returned that the other is given, with their places there."""
    given = {id(leaf): place for place, leaf in reversed(list(enumerate(other.given[0]))) if isinstance(leaf, Tensor)}
    return [(place, given[id(leaf)]) for place, leaf in enumerate(one.returned[0]) if id(leaf) in given]


def _chain(names: Sequence[str], run: Sequence[_Called]) -> Chain:
    """The way in which the blocks follow each other.

    Raises:
        PartitionError: not all in the same way.
    """
    links = [_shared(one, other) for one, other in zip(run, run[1:], strict=False)]
    for index, link in enumerate(links):
        if not link:
            raise PartitionError(
                f"block {names[index + 1]!r} is not called with what {names[index]!r} returned: the model computes "
                "something between the two. Name blocks that follow each other: blocks=[...]."
            )
        if link != links[0]:
            raise PartitionError(
                f"block {names[index + 1]!r} takes over {len(link)} values from {names[index]!r}, in other places than "
                f"{names[1]!r} does from {names[0]!r}. Name blocks of one kind: blocks=[...]."
            )
    exits, entries = zip(*(links[0] if links else [(0, 0)]), strict=True)
    leaves, tree = run[0].returned
    for name, call in zip(names, run, strict=True):
        if call.returned[1] != tree:
            raise PartitionError(
                f"block {name!r} returns another structure than {names[0]!r}. Name blocks of one kind: blocks=[...]."
            )
        if not all(isinstance(call.given[0][place], Tensor) for place in entries):
            raise PartitionError(f"block {name!r} is not called with the tensors that the others are called with.")
    returned = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # others are lost: _compare tells
    dtypes = tuple([run[0].given[0][place].dtype for place in entries])
    return Chain(tuple(names), tuple(entries), returned, tree, tuple(exits), dtypes)


class _Reading(TorchDispatchMode):
    """Notes the storages that operations are given."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for leaf in tree_iter((args, kwargs or {})):
                if isinstance(leaf, Tensor):
                    self._note(leaf)
        return func(*args, **(kwargs or {}))


def _phases(
    model: nn.Module, sample: Any, always: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, set[int]], dict[int, set[int]]]:
    """The phases in which modules were called, and storages read: before the first block, up to the last, after it."""
    phase, called, read = [BEFORE], dict[str, set[int]](), dict[int, set[int]]()

    def at(number: int) -> Callable[..., None]:
        return lambda *_: phase.__setitem__(0, number)

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.setdefault(name, set()).add(phase[0])

    with ExitStack() as stack, torch.no_grad():
        stack.callback(model.get_submodule(names[0]).register_forward_pre_hook(at(WITHIN)).remove)
        stack.callback(model.get_submodule(names[-1]).register_forward_hook(at(AFTER)).remove)
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(note(name)).remove)
        stack.enter_context(_Reading(lambda leaf: read.setdefault(_storage(leaf), set()).add(phase[0])))
        _call(model, sample, always)
    return called, read


# ------------------------------------------------------------------------------------------------------- who gets what


def _shares(model: nn.Module, seen: Seen) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The shares of the beginning and of the end; and the modules with parameters among them."""
    first, last, apart = dict[str, Any](), dict[str, Any](), []
    units = dict(_units(model, "", set(seen.chain.blocks)))
    modules = {name: unit for name, unit in units.items() if isinstance(unit, nn.Module)}
    for name, unit in units.items():
        phases = _used(name, unit, modules, seen)
        has_parameters = name in modules and any(True for _ in modules[name].parameters())
        if has_parameters:
            apart.append(name)
            if WITHIN in seen.called.get(name, ()):
                raise PartitionError(
                    f"module {name!r} is called between blocks, and belongs to none. Name blocks that contain it: "
                    "blocks=[...]."
                )
        has_state = has_parameters or name not in modules or bool(modules[name].state_dict())
        if BEFORE in phases or has_state and phases == {WITHIN}:
            first[name] = unit
        if AFTER in phases or has_state and not phases:
            last[name] = unit
    return first, last, apart


def _used(name: str, unit: nn.Module | Tensor, modules: Mapping[str, nn.Module], seen: Seen) -> set[int]:
    """The phases in which something is used: called, or read where none that has the same parameters is called."""
    tensors = [unit] if isinstance(unit, Tensor) else list(unit.parameters())
    storages = {_storage(tensor) for tensor in tensors}
    read = {phase for storage in storages for phase in seen.read.get(storage, ())}
    if name not in modules:
        return read
    sharing = [
        other for other, module in modules.items() if storages & {_storage(each) for each in module.parameters()}
    ]  # fmt: skip
    inner = [phases for other, phases in seen.called.items() if f"{other}.".startswith(f"{name}.")]
    called = {phase for phases in inner for phase in phases}
    return called | {phase for phase in read if not any(phase in seen.called.get(other, ()) for other in sharing)}


def _units(model: nn.Module, name: str, blocks: set[str]) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """All but the blocks: parameters and buffers of the modules that contain blocks, and their other children."""
    for key, each in [*model._parameters.items(), *model._buffers.items()]:
        if each is not None and key not in model._non_persistent_buffers_set:
            yield f"{name}{key}", each
    for key, child in model._modules.items():
        path = f"{name}{key}"
        if child is None or path in blocks:
            continue
        if any(block.startswith(f"{path}.") for block in blocks):
            yield from _units(child, f"{path}.", blocks)
        else:
            yield path, child


def _carrying(outline: Outline, sample: Any, seen: Seen) -> Chain:
    """The chain, with what blocks are called with that is not made again from the inputs alone.

    Raises:
        PartitionError: a block is called with something that the first one is not.
    """
    chain, leaves = seen.chain, outline.inputs.leaves(sample)
    firsts = {id(leaf): place for place, leaf in enumerate(seen.calls[0][0]) if isinstance(leaf, Tensor)}
    kept: dict[int, int] = {}
    carried = []
    for number, (name, (theirs, their_tree)) in enumerate(zip(chain.blocks, seen.calls, strict=True)):
        hidden = tuple([theirs[place] for place in chain.entries])
        ours, tree = outline.beside(number, hidden, tuple(leaves))
        if tree != their_tree:
            raise PartitionError(f"block {name!r} is called with other arguments where the beginning is elsewhere.")
        places = []
        for place, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            if place in chain.entries or _equal(mine, its):
                continue
            if id(its) not in firsts:
                raise PartitionError(
                    f"block {name!r} is called with a value that the model makes after the first block, or that is no "
                    f"tensor: leaf {place} of its arguments. Blocks that depend on more of each other than the hidden "
                    "state cannot be cut; write the model as an nn.Sequential, with pipeline.skip for what passes by."
                )
            places.append((place, kept.setdefault(firsts[id(its)], len(kept))))
        carried.append(tuple(places))
    return chain._replace(kept=tuple(kept), carried=tuple(carried))


# ------------------------------------------------------------------------------------------------------- comparison


def _compare(
    model: nn.Module, layers: nn.Sequential, sample: Any, always: Mapping[str, Any], make: Callable[[Any], Any]
) -> None:
    """See that the layers compute what the model computes.

    Raises:
        PartitionError: they do not.
    """
    kind = type(model).__name__
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    missing = set(names.values()) - {names.get(id(each), "") for each in layers.parameters()}
    if missing:
        raise PartitionError(f"{kind}: no part has the parameters {', '.join(sorted(missing)[:5])}.")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        expected = make(_call(model, sample, always))
        for leaf in tree_iter(expected):
            if isinstance(leaf, Tensor) and leaf.dim() == 0:
                raise PartitionError(
                    f"{kind} returns a single number, a loss say, and those of chunks cannot be joined. Leave labels "
                    "out of the sample, and give them to step(x, labels, loss_fn=...); or choose with output=..."
                )
        ours, tree = tree_flatten(layers(sample))
        theirs, their_tree = tree_flatten(expected)
        if tree != their_tree or not all(map(_equal, ours, theirs)):
            raise PartitionError(
                f"{kind} does not return on the sample what its parts return: its end uses a value that the beginning "
                f"or a block computes beside the hidden state{_furthest(ours, theirs)}. Cut it by hand, as an "
                "nn.Sequential."
            )
        _compare_grads(kind, ours, theirs, parameters, names)


def _compare_grads(
    kind: str, ours: Leaves, theirs: Leaves, parameters: Sequence[Tensor], names: Mapping[int, str]
) -> None:
    grads = []
    for leaves in (ours, theirs):
        roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            weights = [torch.randn_like(root) for root in roots]
        grads.append(torch.autograd.grad(roots, parameters, weights, allow_unused=True) if roots and parameters else ())
    for parameter, mine, its in zip(parameters, *grads, strict=True) if grads[0] or grads[1] else ():
        if (mine is None) != (its is None) or mine is not None and its is not None and not _near(mine, its):
            raise PartitionError(f"{kind}: the gradient of {names[id(parameter)]} is not that of the model.")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other)


def _near(one: Tensor, other: Tensor) -> bool:
    """But for the order of sums."""
    if not other.numel():
        return True
    bound = 1e3 * torch.finfo(other.dtype).eps * float(other.abs().max())
    return float((one - other).abs().max()) <= bound


def _furthest(ours: Leaves, theirs: Leaves) -> str:
    gaps = [
        float((one - other).detach().abs().max()) for one, other in zip(ours, theirs, strict=False)
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    ]  # fmt: skip
    return f" (the furthest number is {max(gaps):.1e} away)" if gaps else ""


# ------------------------------------------------------------------------------------------------------- small things


def _always(model: nn.Module, sample: Any) -> dict[str, Any]:
    """The keyword arguments that a model is called with beside its inputs."""
    takes = "use_cache" in signature(model.forward).parameters
    return {"use_cache": False} if takes and not (isinstance(sample, dict) and "use_cache" in sample) else {}


def _call(model: nn.Module, x: Any, always: Mapping[str, Any]) -> Any:
    args, kwargs = called_with(x, always)
    return model(*args, **kwargs)


def _plain(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        return {name: value for name, value in returned.items() if value is not None}
    return returned


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
