"""The chains of blocks of a model: modules of which each is called with what the one before returned.

    calls of modules ─► found_chains, or named_chain ─► chains_of ─► Chain: how a hidden state goes from block to block
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from partition.calls import Called
from partition.errors import PartitionError
from partition.outline import Chain, Key

_LEAST = 0.1  # of the parameters of the largest chain: a smaller one is part of what is around it


def found_chains(model: nn.Module, calls: Sequence[Called]) -> list[list[list[Called]]]:
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


def named_chain(model: nn.Module, given: str | Sequence[str], calls: Sequence[Called]) -> list[list[Called]]:
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


def chains_of(runs: Sequence[Sequence[Called]]) -> tuple[Chain, ...]:
    chains, first = [], 0
    for run in runs:
        chains.append(_chain(run)._replace(first=first))
        first += len(run)
    return tuple(chains)


def _chain(run: Sequence[Called]) -> Chain:
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
    returned = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # others are lost: compare tells
    dtypes = tuple([leaf.dtype if isinstance(leaf, Tensor) else None for leaf in hidden])
    return Chain(tuple(names), entries, returned, tree, exits, dtypes)


def _once(calls: Sequence[Called]) -> dict[str, Called]:
    times = Counter(call.name for call in calls)
    return {call.name: call for call in calls if times[call.name] == 1}


def _continued(run: Sequence[Called], runs: Sequence[Sequence[Called]]) -> list[Called]:
    """A run, and those that follow it: the blocks of the next resolution, say."""
    whole = list(run)
    for other in sorted(runs, key=lambda each: each[0].begin):
        if other[0].begin > whole[-1].end and _shared(whole[-1], other[0]) == _shared(*whole[-2:]):
            whole += other
    return whole


def _size(model: nn.Module, run: Sequence[Called]) -> int:
    return sum(parameter.numel() for call in run for parameter in model.get_submodule(call.name).parameters())


def _follow(run: Sequence[Called]) -> bool:
    """Whether each is called with something that the one before returned."""
    return all(_shared(one, other) for one, other in zip(run, run[1:], strict=False))


def _shared(one: Called, other: Called) -> list[tuple[int, Key]]:
    """The leaves of what one returned that are arguments of the other."""
    given = {id(other.given[key]): key for key in reversed(other.given.keys) if isinstance(other.given[key], Tensor)}
    return [(place, given[id(leaf)]) for place, leaf in enumerate(one.returned[0]) if id(leaf) in given]
