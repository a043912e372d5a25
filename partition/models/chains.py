"""The blocks of a model, and their chains: modules of which each is called with what the one before returned.

    calls of modules ─► found_blocks, or named_blocks ─► chains_of ─► BlockChain: how a hidden state goes on from each
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from partition.errors import PartitionError
from partition.models.calls import Called
from partition.models.inputs import Leaves
from partition.models.runs import ArgumentKey, BlockChain

_LEAST = 0.1  # of the parameters of the largest chain: a smaller one is part of what is around it


def found_blocks(model: nn.Module, calls: Sequence[Called]) -> list[list[Called]]:
    """The blocks of a model, in ways to be tried in turn.

    All chains of blocks of one type that have a good part of the parameters, which may be called several times; each of
    them alone; all modules that are called once with a tensor, and return one, where these have most of the parameters;
    those of them that have some; the same with those that are called several times.

    Raises:
        PartitionError: there are none.
    """
    once, within = _once(calls), defaultdict[str, list[Called]](list)
    for call in calls:
        within[call.name.rpartition(".")[0]].append(call)
    runs = []
    for name, of_children in within.items():
        children = {child for _, child in model.get_submodule(name).named_children()}
        called, links = {model.get_submodule(call.name) for call in of_children}, _links(of_children)
        if called == children and len(set(map(type, called))) == 1 and all(len(link) > 1 for link in links):
            runs += links
    chains = [_continued(run, runs) for run in runs]
    # Rather what is called once; and layers rather than the stages that they fill.
    chains.sort(key=lambda run: (any(call.name not in once for call in run), -_size(model, run), -len(run)))
    several = chains[:1]
    for run in chains[1:]:
        is_apart = all(run[0].begin > other[-1].end or run[-1].end < other[0].begin for other in several)
        if is_apart and _size(model, run) > _LEAST * _size(model, chains[0]):
            several.append(run)
    ways = [sorted([call for run in several for call in run], key=_begin), *several] if several[1:] else several
    for some in (sorted(once.values(), key=_begin), calls):
        names = set(_units(model, "", {call.name for call in some}))
        units = _apart([call for call in some if call.name in names and _has_hidden(call)])
        if len(units) > 1 and 2 * _size(model, units) > _all_size(model):
            ways += [way for way in (units, _with_parameters(model, units)) if way not in ways]
    if not ways:
        raise PartitionError(
            f"{type(model).__name__} has no blocks: no modules that are called with a tensor and have most of its "
            "parameters. Name them, blocks=[...], or write the model as an nn.Sequential."
        )
    return ways


def named_blocks(model: nn.Module, given: str | Sequence[str], calls: Sequence[Called]) -> list[Called]:
    """The blocks that the caller names.

    Raises:
        PartitionError: there is no such module, or it is not called.
    """
    names = []
    known = dict(model.named_modules())
    for name in [given] if isinstance(given, str) else given:
        if name not in known:
            raise PartitionError(f"blocks: {type(model).__name__} has no module {name!r}.")
        is_container = isinstance(known[name], nn.ModuleList | nn.Sequential | nn.ModuleDict)
        names += [f"{name}.{key}" for key in known[name]._modules] if is_container else [name]
    blocks = [call for call in calls if call.name in names]
    for name in names:
        if not any(block.name == name for block in blocks):
            raise PartitionError(f"block {name!r} is not called in a forward.")
    for one, other in zip(blocks, blocks[1:], strict=False):
        if other.begin < one.end:
            raise PartitionError(f"block {other.name!r} is called within block {one.name!r}. Name one of the two.")
    return blocks


def broken_links(blocks: Sequence[Called], in_train_mode: Sequence[Called]) -> set[int]:
    """The numbers of blocks that are not called in train mode with what the one before returned: dropout is between."""
    found = called_again(in_train_mode, blocks)
    return {number for number, (one, other) in enumerate(zip(found, found[1:]), 1) if not _shared(one, other)}


def called_again(calls: Sequence[Called], blocks: Sequence[Called]) -> list[Called]:
    """The calls of blocks in another run; none where they are not called there as often, and in this order."""
    names = [block.name for block in blocks]
    found = [call for call in calls if call.name in names]
    return found if [call.name for call in found] == names else []


def chains_of(
    model: nn.Module, blocks: Sequence[Called], calls: Sequence[Called], begins: Container[int]
) -> tuple[BlockChain, ...]:
    """The chains that blocks make, in their order: a block whose hidden state is not that of the one before begins one.

    Args:
        model: the model.
        blocks: of the model.
        calls: of all modules.
        begins: the numbers of blocks that begin a chain besides.

    Raises:
        PartitionError: a block has no hidden state.
    """
    trained = _with_parameters(model, calls)
    runs: list[list[Called]] = []
    for number, block in enumerate(blocks):
        run = runs[-1] if runs else []
        is_next = run and number not in begins and _continues(run, block)
        if is_next and not any(run[-1].end < call.begin and call.end < block.begin for call in trained):
            run.append(block)
        else:
            runs.append([block])
    chains: list[BlockChain] = []
    for run in runs:
        chains.append(_chain(run)._replace(first=chains[-1].last + 1 if chains else 0))
    return tuple(chains)


def _with_parameters(model: nn.Module, calls: Iterable[Called]) -> list[Called]:
    """The calls of modules that have parameters."""
    return [call for call in calls if next(model.get_submodule(call.name).parameters(), None) is not None]


def _continues(run: Sequence[Called], block: Called) -> bool:
    """Whether a block takes its hidden state from the last of a run, as that does from the one before it."""
    link, first = _shared(run[-1], block), run[0]
    is_alike = _plain(block) == _plain(first) and all(key in first.given.leaves for _, key in link)
    return bool(link) and is_alike and (len(run) == 1 or link == _shared(*run[:2]))


def _plain(call: Called) -> tuple[TreeSpec, Leaves]:
    """The tree of what a module returns, and what is plain in it: the size of an image, say."""
    leaves, tree = call.returned
    return tree, [leaf if isinstance(leaf, bool | int | float | str) else None for leaf in leaves]


def _chain(run: Sequence[Called]) -> BlockChain:
    """The chain of blocks that follow each other.

    Raises:
        PartitionError: a block has no hidden state.
    """
    first = run[0]
    leaves, tree = first.returned
    exits = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][:1]
    entries = [key for key, leaf in first.given.leaves.items() if isinstance(leaf, Tensor)][:1]
    links = _shared(first, run[1]) if len(run) > 1 else list(zip(exits, entries, strict=False))
    hidden = [first.given[entry] for _, entry in links]
    if not any(isinstance(leaf, Tensor) for leaf in hidden):
        raise PartitionError(
            f"block {first.name!r} is not called with a tensor, or returns none: it has no hidden state. Name others: "
            "blocks=[...]."
        )
    returned = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    dtypes = tuple([leaf.dtype if isinstance(leaf, Tensor) else None for leaf in hidden])
    names = tuple([call.name for call in run])
    none = frozenset([place for place, leaf in enumerate(leaves) if leaf is None])
    entries, exits = [key for _, key in links], [exit for exit, _ in links]
    return BlockChain(names, tuple(entries), returned, tree, tuple(exits), none, dtypes)


def _units(model: nn.Module, name: str, called: Container[str]) -> Iterator[str]:
    """The modules that are called, as large as can be; of one with most of the parameters its children."""
    for key, child in model.get_submodule(name).named_children():
        path = f"{name}.{key}" if name else key
        if path in called and (2 * _all_size(child) < _all_size(model) or not list(child.children())):
            yield path
        else:
            yield from _units(model, path, called)


def _apart(calls: Iterable[Called]) -> list[Called]:
    """The calls, in order, that lie within no other: a module may have another name outside of what calls it."""
    found: list[Called] = []
    for call in calls:
        if not found or call.begin > found[-1].end:
            found.append(call)
    return found


def _once(calls: Sequence[Called]) -> dict[str, Called]:
    times = Counter(call.name for call in calls)
    return {call.name: call for call in calls if times[call.name] == 1}


def _continued(run: Sequence[Called], runs: Sequence[Sequence[Called]]) -> list[Called]:
    """A run, and those that follow it: the blocks of the next resolution, say."""
    whole = list(run)
    for other in sorted(runs, key=lambda run: run[0].begin):
        if other[0].begin > whole[-1].end and _shared(whole[-1], other[0]) == _shared(*whole[-2:]):
            whole += other
    return whole


def _has_hidden(call: Called) -> bool:
    """Whether a module was called with a tensor, and returned one."""
    both = (call.given.leaves.values(), call.returned[0])
    return all(any(isinstance(leaf, Tensor) for leaf in leaves) for leaves in both)


def _size(model: nn.Module, run: Sequence[Called]) -> int:
    return sum(_all_size(model.get_submodule(name)) for name in {call.name for call in run})


def _all_size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _begin(call: Called) -> int:
    return call.begin


def _links(run: Iterable[Called]) -> list[list[Called]]:
    """Calls in groups, as long as each is called with something that the one before returned."""
    links: list[list[Called]] = []
    for call in run:
        if links and _shared(links[-1][-1], call):
            links[-1].append(call)
        else:
            links.append([call])
    return links


def _shared(one: Called, other: Called) -> list[tuple[int, ArgumentKey]]:
    """The leaves of what one returned that are leaves of the other's arguments."""
    return [(place, other.entered[state]) for place, state in enumerate(one.left) if state in other.entered]
