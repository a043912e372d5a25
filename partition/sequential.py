"""A model that is a beginning, a run of blocks and an end, as an nn.Sequential of its own modules.

    model, sample ─► runs, watched ─► Chain: blocks that hand a hidden state on ─► Outline, Beginning, Block ..., End
                                     └─► what is called and read before, between and after them
    compared with the model on the sample: outputs, gradients, what each block is called with

Nothing is traced: each part runs the model's own forward (`partition.outline`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_leaves

from partition.errors import PartitionError
from partition.outline import (
    Call,
    Chain,
    Inputs,
    Key,
    Leaves,
    Outline,
    UnreadError,
    Volatile,
    around,
    called_with,
    rebuilt,
)
from partition.parts import Beginning, Block, End, Holder, Middle, Part

_LEAST = 0.1  # of the parameters of the largest chain: a smaller one is part of what is around it


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
    compared with the model on the sample: outputs to the bit, in eval mode and under one seed in train mode; gradients
    nearly.

    Args:
        model: any module that calls one block after the other, each on what the one before returned. Models of Hugging
            Face's transformers are called with `use_cache=False`.
        sample: what it is called with: a dict of keyword arguments, a tuple of positional ones, or a tensor; rows along
            dim 0. Afterwards the nn.Sequential, or a Pipe, is called with one such value.
        blocks: the names of the blocks, or of modules whose children they are, in order. None: the longest chain, and
            others beside it, of an encoder and a decoder.
        output: what to make of what the model returns. None: a mapping becomes a dict of its entries that are not None.

    Returns:
        Layers: the beginning, each block, the end; between two chains of blocks, what the model computes there.

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
    always = _always(model, sample)
    with _in_eval_mode(model), torch.random.fork_rng():
        volatile = _volatile(model, sample, always)
        calls = _all_calls(model, sample, always)
        choices = [_named(model, blocks, calls)] if blocks is not None else _found(model, calls)
        layers = None
        for runs in choices[:-1]:
            with suppress(PartitionError):
                layers = layers or _cut(model, sample, always, volatile, runs, output or _plain)
        layers = layers or _cut(model, sample, always, volatile, choices[-1], output or _plain)
    return _in_mode(layers, model.training)


def _cut(
    model: nn.Module,
    sample: Any,
    always: Mapping[str, Any],
    volatile: Volatile,
    runs: Sequence[Sequence[_Called]],
    output: Callable[[Any], Any],
) -> nn.Sequential:
    """The layers, compared with the model.

    Raises:
        PartitionError: they compute something else.
    """
    chains = _chains(runs)
    phases = _phases(model, sample, always, chains)
    shares, apart = _shares(model, chains, phases)
    for name in around(chains):
        module = model.get_submodule(name)
        for key in module._buffers:
            if (id(module), key) in volatile:
                raise PartitionError(
                    f"the forward of {type(module).__name__}, which contains blocks, writes its buffer {key!r}, and "
                    "each part would write it again. Move it into a module of its own."
                )
    leaves, tree = tree_flatten(sample)
    names = tuple(sample) if isinstance(sample, Mapping) else None
    inputs = Inputs(names, tree, always, tuple([not isinstance(leaf, Tensor) for leaf in leaves]))
    try:
        outline = Outline(model, chains, inputs, apart, volatile)
        chains = tuple([_carrying(outline, chain, run, leaves) for chain, run in zip(chains, runs, strict=True)])
        while True:
            layers = _layers(model, Outline(model, chains, inputs, apart, volatile), shares, output)
            try:
                _compare(model, layers, sample, always, output)
                _compare_in_train_mode(model, layers, sample, always, output)
                return layers
            except UnreadError as error:
                read = [is_read or number == error.leaf for number, is_read in enumerate(inputs.read)]
                inputs = inputs._replace(read=tuple(read))
    except PartitionError:
        raise
    except Exception as error:
        raise PartitionError(
            f"{type(model).__name__}'s forward does not run without its blocks: {type(error).__name__}: {error}. "
            "Cut it by hand, as an nn.Sequential."
        ) from error


def _layers(
    model: nn.Module, outline: Outline, shares: Sequence[Mapping[str, Any]], output: Callable[[Any], Any]
) -> nn.Sequential:
    seen: set[str] = set()
    layers: list[nn.Module] = []
    for number, share in enumerate(shares):
        again = {name for name in seen & set(share) if isinstance(share[name], nn.Module)}
        own = {name: _sharing(each) if name in again else each for name, each in share.items()}
        seen.update(share)
        if number == 0:
            layers.append(Beginning(outline, own))
        elif number < len(outline.chains):
            layers.append(Middle(outline, own, number))
        else:
            layers.append(End(outline, own, output))
            break
        chain = outline.chains[number]
        blocks = [(chain.first + index, name) for index, name in enumerate(chain.blocks)]
        layers += [Block(outline, index, name, model.get_submodule(name)) for index, name in blocks]
    return _in_mode(nn.Sequential(*layers), False)


def _in_mode(layers: nn.Sequential, training: bool) -> nn.Sequential:
    """The layers in train or eval mode: all that is not the model's, which keeps its own."""
    for module in layers.modules():
        if module is layers or isinstance(module, Part | Holder):
            module.training = training
    return layers


def _sharing(module: nn.Module) -> nn.Module:
    """Another module with the same parameters: two parts of the model hold it."""
    return rebuilt(module, lambda tensor: tensor)


# ------------------------------------------------------------------------------------------------------- one run


def _volatile(model: nn.Module, sample: Any, always: Mapping[str, Any]) -> Volatile:
    """The attributes that the modules' forwards set, and the buffers that they write, in train and in eval mode."""
    found: set[tuple[int, str]] = set()
    own = nn.Module.__setattr__

    def note(module: nn.Module, name: str, value: Any) -> None:
        found.add((id(module), name))
        own(module, name, value)

    with _training(model), torch.no_grad():
        buffers = [(id(module), name, each, each._version) for module in model.modules()
                   for name, each in module._buffers.items() if each is not None]  # fmt: skip
        nn.Module.__setattr__ = note  # type: ignore[method-assign, assignment]
        try:
            _call(model, sample, always)
            for module in model.modules():
                vars(module)["training"] = False
            _call(model, sample, always)
        finally:
            nn.Module.__setattr__ = own  # type: ignore[method-assign]
        found.update((owner, name) for owner, name, each, version in buffers if each._version != version)
    return frozenset(found)


@contextmanager
def _training(*modules: nn.Module) -> Iterator[None]:
    """Within: train mode; at the end eval mode, and buffers as they were."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    for module in modules:
        module.train()
    try:
        yield
    finally:
        for module in modules:
            module.eval()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class _Called(NamedTuple):
    name: str
    begin: int
    end: int
    given: Call
    returned: tuple[Leaves, TreeSpec]


def _all_calls(model: nn.Module, sample: Any, always: Mapping[str, Any]) -> list[_Called]:
    """Every call of a module within the model, in the order in which they began."""
    found: list[_Called] = []
    clock = iter(range(10**9))
    open_calls: list[tuple[int, Call]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        open_calls.append((next(clock), Call(args, kwargs)))

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


def _found(model: nn.Module, calls: Sequence[_Called]) -> list[list[list[_Called]]]:
    """The chains of a model: all that have a good part of its parameters; the longest alone.

    Raises:
        PartitionError: there is none.
    """
    once = _once(calls)
    runs = []
    for name, module in model.named_modules():
        children = [f"{name}.{key}" if name else key for key in module._modules]
        run = [once[child] for child in children if child in once]
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
    chains.sort(key=lambda run: -_size(model, run))
    several = chains[:1]
    for run in chains[1:]:
        is_apart = all(run[0].begin > other[-1].end or run[-1].end < other[0].begin for other in several)
        if is_apart and _size(model, run) > _LEAST * _size(model, chains[0]):
            several.append(run)
    several.sort(key=lambda run: run[0].begin)
    return [several, chains[:1]] if len(several) > 1 else [several]


def _once(calls: Sequence[_Called]) -> dict[str, _Called]:
    times = Counter(call.name for call in calls)
    return {call.name: call for call in calls if times[call.name] == 1}


def _continued(run: Sequence[_Called], runs: Sequence[Sequence[_Called]]) -> list[_Called]:
    """A run, and those that follow it: the blocks of the next resolution, say."""
    whole = list(run)
    for other in sorted(runs, key=lambda each: each[0].begin):
        if other[0].begin > whole[-1].end and _shared(whole[-1], other[0]) == _shared(*whole[-2:]):
            whole += other
    return whole


def _named(model: nn.Module, given: str | Sequence[str], calls: Sequence[_Called]) -> list[list[_Called]]:
    """The chain of the blocks that the caller names.

    Raises:
        PartitionError: there is no such module, or it is not called once.
    """
    names = []
    known = dict(model.named_modules())
    for name in [given] if isinstance(given, str) else given:
        if name not in known:
            raise PartitionError(f"blocks: {type(model).__name__} has no module {name!r}.")
        is_container = isinstance(known[name], nn.ModuleList | nn.Sequential | nn.ModuleDict)
        names += [f"{name}.{key}" for key in known[name]._modules] if is_container else [name]
    once = _once(calls)
    for name in names:
        if name not in once:
            times = sum(call.name == name for call in calls)
            raise PartitionError(f"block {name!r} is called {times} times in a forward, and must be once.")
    return [[once[name] for name in names]]


def _size(model: nn.Module, run: Sequence[_Called]) -> int:
    return sum(parameter.numel() for call in run for parameter in model.get_submodule(call.name).parameters())


def _follow(run: Sequence[_Called]) -> bool:
    """Whether each is called with something that the one before returned."""
    return all(_shared(one, other) for one, other in zip(run, run[1:], strict=False))


def _shared(one: _Called, other: _Called) -> list[tuple[int, Key]]:
    """The leaves of what one returned that are arguments of the other."""
    given = {id(other.given[key]): key for key in reversed(other.given.keys) if isinstance(other.given[key], Tensor)}
    return [(place, given[id(leaf)]) for place, leaf in enumerate(one.returned[0]) if id(leaf) in given]


def _chains(runs: Sequence[Sequence[_Called]]) -> tuple[Chain, ...]:
    chains, first = [], 0
    for run in runs:
        chains.append(_chain(run)._replace(first=first))
        first += len(run)
    return tuple(chains)


def _chain(run: Sequence[_Called]) -> Chain:
    """The way in which blocks follow each other.

    Raises:
        PartitionError: not all in the same way.
    """
    names = [call.name for call in run]
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
    exits, entries = map(tuple, zip(*(links[0] if links else [(0, 0)]), strict=True))
    leaves, tree = run[0].returned
    for call in run:
        if call.returned[1] != tree:
            raise PartitionError(
                f"block {call.name!r} returns another structure than {names[0]!r}. Name blocks of one kind: "
                "blocks=[...]."
            )
    hidden = [run[0].given[key] for key in entries]
    if not any(isinstance(leaf, Tensor) for leaf in hidden):
        raise PartitionError(f"block {names[0]!r} is not called with a tensor where the others are.")
    returned = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # others are lost: _compare tells
    dtypes = tuple([leaf.dtype if isinstance(leaf, Tensor) else None for leaf in hidden])
    return Chain(tuple(names), entries, returned, tree, exits, dtypes)


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


class Phases(NamedTuple):
    """The phases in which things are used: 0 before the first chain, 1 within it, 2 after it, 3 within the next, ...

    Attributes:
        called: by the name of a module.
        read: by a storage.
    """

    called: dict[str, set[int]]
    read: dict[int, set[int]]


def _phases(model: nn.Module, sample: Any, always: Mapping[str, Any], chains: Sequence[Chain]) -> Phases:
    """Run the model, and note what it uses when."""
    now, found = [0], Phases({}, {})

    def at(phase: int) -> Callable[..., None]:
        return lambda *_: now.__setitem__(0, phase)

    def note(name: str) -> Callable[..., None]:
        return lambda *_: found.called.setdefault(name, set()).add(now[0])

    with ExitStack() as stack, torch.no_grad():
        for number, chain in enumerate(chains):
            begin, end = model.get_submodule(chain.blocks[0]), model.get_submodule(chain.blocks[-1])
            stack.callback(begin.register_forward_pre_hook(at(2 * number + 1)).remove)
            stack.callback(end.register_forward_hook(at(2 * number + 2)).remove)
        for name, module in model.named_modules(remove_duplicate=False):
            stack.callback(module.register_forward_pre_hook(note(name)).remove)
        stack.enter_context(_Reading(lambda leaf: found.read.setdefault(_storage(leaf), set()).add(now[0])))
        _call(model, sample, always)
    return found


# ------------------------------------------------------------------------------------------------------- who gets what


def _shares(model: nn.Module, chains: Sequence[Chain], phases: Phases) -> tuple[list[dict[str, Any]], list[str]]:
    """The shares of the parts that are no blocks, in order; and the modules with parameters among them."""
    shares: list[dict[str, Any]] = [{} for _ in range(len(chains) + 1)]
    apart = []
    units = dict(_units(model, "", {name for chain in chains for name in chain.blocks}))
    modules = {name: unit for name, unit in units.items() if isinstance(unit, nn.Module)}
    for name, unit in units.items():
        used = _used(name, unit, modules, phases)
        has_parameters = name in modules and any(True for _ in modules[name].parameters())
        if has_parameters:
            apart.append(name)
            if any(phase % 2 for phase in phases.called.get(name, ())):
                raise PartitionError(
                    f"module {name!r} is called between blocks, and belongs to none. Name blocks that contain it: "
                    "blocks=[...]."
                )
        owners = {phase // 2 for phase in used if phase % 2 == 0}
        if not owners and (has_parameters or name not in modules or modules[name].state_dict()):
            owners = {phase // 2 for phase in used} or {len(chains)}  # handed to blocks from before; or unused
        for owner in owners:
            shares[owner][name] = unit
    return shares, apart


def _used(name: str, unit: nn.Module | Tensor, modules: Mapping[str, nn.Module], phases: Phases) -> set[int]:
    """The phases in which something is used: called, or read where none that has the same parameters is called."""
    tensors = [unit] if isinstance(unit, Tensor) else list(unit.parameters())
    storages = {_storage(tensor) for tensor in tensors}
    read = {phase for storage in storages for phase in phases.read.get(storage, ())}
    if name not in modules:
        return read
    sharing = [
        other for other, module in modules.items() if storages & {_storage(each) for each in module.parameters()}
    ]  # fmt: skip
    inner = [found for other, found in phases.called.items() if f"{other}.".startswith(f"{name}.")]
    called = {phase for found in inner for phase in found}
    return called | {phase for phase in read if not any(phase in phases.called.get(other, ()) for other in sharing)}


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


def _carrying(outline: Outline, chain: Chain, run: Sequence[_Called], leaves: Leaves) -> Chain:
    """A chain, with what its blocks are called with that is not made again from the inputs alone.

    Raises:
        PartitionError: a block is called with something that the first one is not.
    """
    first = run[0].given
    device = next(first[key].device for key in chain.entries if first[key] is not None)
    kept: dict[Key, int] = {}
    carried = []
    for number, (name, theirs) in enumerate([(call.name, call.given) for call in run], chain.first):
        ours = outline.beside(number, device, tuple(leaves))
        if ours.keys != theirs.keys:
            raise PartitionError(f"block {name!r} is called with other arguments where the beginning is elsewhere.")
        others = [key for key in theirs.keys if key not in chain.entries and not _same(ours[key], theirs[key])]
        places = []
        for key in others:
            source = next((other for other in first.keys if _is(first[other], theirs[key])), None)
            if source is None:
                raise PartitionError(
                    f"block {name!r} is called with a value that the model makes after the first block, or that is no "
                    f"tensor: its argument {key!r}. Blocks that depend on more of each other than the hidden state "
                    "cannot be cut; write the model as an nn.Sequential, with pipeline.skip for what passes by."
                )
            places.append((key, kept.setdefault(source, len(kept))))
        carried.append(tuple(places))
    return chain._replace(kept=tuple(kept), carried=tuple(carried))


def _same(one: Any, other: Any) -> bool:
    """Whether two values hold the same numbers."""
    (ours, tree), (theirs, their_tree) = tree_flatten(one), tree_flatten(other)
    return tree == their_tree and all(map(_equal, ours, theirs))


def _is(one: Any, other: Any) -> bool:
    """Whether two values hold the same tensors, and there are some."""
    ours, theirs = tree_leaves(one), tree_leaves(other)
    are = len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
    return are and any(isinstance(leaf, Tensor) for leaf in ours)


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


def _compare_in_train_mode(
    model: nn.Module, layers: nn.Sequential, sample: Any, always: Mapping[str, Any], make: Callable[[Any], Any]
) -> None:
    """See that they return the same in train mode, under one seed.

    Raises:
        PartitionError: they do not.
    """
    found = []
    for whole in (True, False):
        with _training(model, layers), torch.no_grad():
            torch.manual_seed(0)
            found.append(make(_call(model, sample, always)) if whole else layers(sample))
    if not _same(*found):
        raise PartitionError(
            f"{type(model).__name__} does not return in train mode what its parts return: its end uses what a block "
            "hands over beside the hidden state, or draws random numbers in another order. Cut it by hand, as an "
            "nn.Sequential."
        )


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
