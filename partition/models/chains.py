"""The blocks of a model, and their chains: modules of which each is called with what the one before returned.

    calls of modules ─► found_blocks, or named_blocks ─► chains_of ─► BlockChain: how a hidden state goes on from each
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

from torch import Tensor, nn

from partition.errors import PartitionError
from partition.models.as_found import is_same
from partition.models.calls import ModuleCall
from partition.models.runs import ArgumentKey, BlockChain
from partition.opaque import seen_of

_LARGER_PIECE = 2  # times the largest piece of the finest way: as good as that
_SMALLEST_SHARE = 0.1  # of the parameters of the largest chain: a smaller one is part of what is around it


def found_blocks(model: nn.Module, calls: Sequence[ModuleCall]) -> list[list[ModuleCall]]:
    """The blocks of a model, in ways to be tried in turn.

    All chains of blocks of one type that have a good part of the parameters, which may be called several times; each of
    them alone; all modules that are called once with a tensor, and return one, where these have most of the parameters;
    those of them that have some; the same with those that are called several times. Ways that leave more than twice as
    much in one piece as the finest come last.

    Raises:
        PartitionError: there are none.
    """
    single_calls, calls_by_parent = _single_calls(calls), defaultdict[str, list[ModuleCall]](list)
    for call in calls:
        calls_by_parent[call.name.rpartition(".")[0]].append(call)
    runs = []
    for child_calls in calls_by_parent.values():
        kinds, links = {type(model.get_submodule(call.name)) for call in child_calls}, _links(child_calls)
        if len(kinds) == 1 and all(len(link) > 1 for link in links):
            runs += links
    chains = [_continued(run, runs) for run in runs]
    # Rather what is called once; and layers rather than the stages that they fill.
    chains.sort(key=lambda run: (any(call.name not in single_calls for call in run), -_size(model, run), -len(run)))
    separate = chains[:1]
    for run in chains[1:]:
        is_apart = all(run[0].begin > chain[-1].end or run[-1].end < chain[0].begin for chain in separate)
        if is_apart and _size(model, run) > _SMALLEST_SHARE * _size(model, chains[0]):
            separate.append(run)
    ways = [sorted([call for run in separate for call in run], key=_begin), *separate] if separate[1:] else separate
    for candidates in (sorted(single_calls.values(), key=_begin), calls):
        names = set(_units(model, "", {call.name for call in candidates}))
        units = outermost_calls(filter(_has_hidden, candidates), names)
        if len(units) > 1 and 2 * _size(model, units) > _all_size(model):
            ways += [way for way in (units, _with_parameters(model, units)) if way not in ways]
    if not ways:
        raise PartitionError(
            f"{type(model).__name__} has no blocks: no modules that are called with a tensor and have most of its "
            "parameters. Name them, to_sequential(model, sample, blocks=[...]), or write the model as an nn.Sequential."
        )
    sizes = [_largest_piece(model, calls, way) for way in ways]
    order = sorted(range(len(ways)), key=lambda number: max(sizes[number], _LARGER_PIECE * min(sizes)))
    return [ways[number] for number in order]


def named_blocks(model: nn.Module, selection: str | Sequence[str], calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The blocks that the caller names.

    Raises:
        PartitionError: there is no such module, or it is not called.
    """
    names = []
    modules = dict(model.named_modules())
    selection = [selection] if isinstance(selection, str) else selection
    if not (isinstance(selection, Iterable) and selection):
        raise PartitionError(f"blocks is {selection!r}. Name modules, such as 'model.layers', or leave it out.")
    for name in selection:
        if name not in modules:
            raise PartitionError(f"blocks: {type(model).__name__} has no module {name!r}.")
        is_container = isinstance(modules[name], nn.ModuleList | nn.Sequential | nn.ModuleDict)
        names += [f"{name}.{key}" for key in modules[name]._modules] if is_container else [name]
    blocks = [call for call in calls if call.name in names]
    for name in names:
        if not any(block.name == name for block in blocks):
            raise PartitionError(f"block {name!r} is not called in a forward.")
    for block, later in zip(blocks, blocks[1:], strict=False):
        if later.begin < block.end:
            raise PartitionError(f"block {later.name!r} is called within block {block.name!r}. Name one of the two.")
    return blocks


def broken_links(model: nn.Module, blocks: Sequence[ModuleCall], runs: Iterable[Sequence[ModuleCall]]) -> set[int]:
    """The numbers of blocks that are not just called with what the one before returned in one of some runs.

    Dropout is between the two in train mode, or a module with parameters is called there: an auxiliary head.
    """
    numbers: set[int] = set()
    for calls in runs:
        block_calls, trained = called_again(calls, blocks), _with_parameters(model, calls)
        numbers.update([
            number for number, (earlier, later) in enumerate(zip(block_calls, block_calls[1:]), 1)
            if not _shared(earlier, later)
            or any(earlier.end < call.begin and call.end < later.begin for call in trained)
        ])  # fmt: skip
    return numbers


def called_again(calls: Iterable[ModuleCall], blocks: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls of blocks in another run; none where they are not called there as often, and in this order."""
    names = [block.name for block in blocks]
    block_calls = outermost_calls(calls, names)
    return block_calls if [call.name for call in block_calls] == names else []


def outermost_calls(calls: Iterable[ModuleCall], names: Container[str]) -> list[ModuleCall]:
    """The calls of modules of these names, in order, that lie within no other: a block may use another."""
    outermost: list[ModuleCall] = []
    for call in calls:
        if call.name in names and (not outermost or call.begin > outermost[-1].end):
            outermost.append(call)
    return outermost


def chains_of(blocks: Sequence[ModuleCall], begins: Container[int]) -> tuple[BlockChain, ...]:
    """The chains that blocks make, in their order: a block whose hidden state is not that of the one before begins one.

    Args:
        blocks: of a model.
        begins: the numbers of blocks that begin a chain besides.

    Raises:
        PartitionError: a block has no hidden state.
    """
    runs: list[list[ModuleCall]] = []
    for number, block in enumerate(blocks):
        run = runs[-1] if runs else []
        if run and number not in begins and _continues(run, block):
            run.append(block)
        else:
            runs.append([block])
    chains: list[BlockChain] = []
    for run in runs:
        chains.append(_chain(run)._replace(first=chains[-1].last + 1 if chains else 0))
    return tuple(chains)


def _with_parameters(model: nn.Module, calls: Iterable[ModuleCall]) -> list[ModuleCall]:
    """The calls of modules that have parameters."""
    return [call for call in calls if next(model.get_submodule(call.name).parameters(), None) is not None]


def _continues(run: Sequence[ModuleCall], block: ModuleCall) -> bool:
    """Whether a block takes its hidden state from the last of a run, as that does from the one before it."""
    link, first = _shared(run[-1], block), run[0]
    is_alike = _returns_like(block, first) and all(key in first.arguments.leaves for _, key in link)
    carries = any(isinstance(first.arguments.leaves.get(key), Tensor) for _, key in link)
    return carries and is_alike and (len(run) == 1 or link == _shared(*run[:2]))


def _returns_like(one: ModuleCall, other: ModuleCall) -> bool:
    """Whether two modules return the same tree, and in it the same plain values: the size of an image, say."""
    (leaves, tree), (other_leaves, other_tree) = one.returned, other.returned
    return tree == other_tree and all(map(is_same, map(seen_of, leaves), map(seen_of, other_leaves)))


def _chain(run: Sequence[ModuleCall]) -> BlockChain:
    """The chain of blocks that follow each other.

    Raises:
        PartitionError: a block has no hidden state.
    """
    first = run[0]
    leaves, tree = first.returned
    exits = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][:1]
    entries = [key for key, leaf in first.arguments.leaves.items() if isinstance(leaf, Tensor)][:1]
    links = _shared(first, run[1]) if len(run) > 1 else list(zip(exits, entries, strict=False))
    hidden = [first.arguments[entry] for _, entry in links]
    if not any(isinstance(leaf, Tensor) for leaf in hidden):
        raise PartitionError(
            f"block {first.name!r} is not called with a tensor, or returns none: it has no hidden state. Name others: "
            "to_sequential(model, sample, blocks=[...])."
        )
    returned = list(map(seen_of, leaves))
    dtypes = tuple([leaf.dtype if isinstance(leaf, Tensor) and leaf.is_floating_point() else None for leaf in hidden])
    names = tuple([call.name for call in run])
    entries, exits = [key for _, key in links], [exit for exit, _ in links]
    return BlockChain(names, tuple(entries), returned, tree, tuple(exits), dtypes)


def _units(model: nn.Module, name: str, called_names: Container[str]) -> Iterator[str]:
    """The modules that are called, as large as can be; of one with most parameters those in it that have them."""
    for key, child in model.get_submodule(name).named_children():
        path = f"{name}.{key}" if name else key
        units = list(_units(model, path, called_names))
        in_units = sum([_all_size(model.get_submodule(unit)) for unit in units])
        is_smaller = 2 * _all_size(child) < _all_size(model) or 2 * in_units <= _all_size(child)
        yield from [path] if path in called_names and is_smaller else units


def _single_calls(calls: Sequence[ModuleCall]) -> dict[str, ModuleCall]:
    times = Counter(call.name for call in calls)
    return {call.name: call for call in calls if times[call.name] == 1}


def _continued(run: Sequence[ModuleCall], runs: Sequence[Sequence[ModuleCall]]) -> list[ModuleCall]:
    """A run, and those that follow it: the blocks of the next resolution, say."""
    chain = list(run)
    for candidate in sorted(runs, key=lambda run: run[0].begin):
        if candidate[0].begin > chain[-1].end and _shared(chain[-1], candidate[0]) == _shared(*chain[-2:]):
            chain += candidate
    return chain


def _has_hidden(call: ModuleCall) -> bool:
    """Whether a module was called with a tensor, and returned one."""
    leaves_of_both = (call.arguments.leaves.values(), call.returned[0])
    return all(any(isinstance(leaf, Tensor) for leaf in leaves) for leaves in leaves_of_both)


def _largest_piece(model: nn.Module, calls: Sequence[ModuleCall], blocks: Sequence[ModuleCall]) -> int:
    """The most parameters that are in one block, or called between two."""
    begins, pieces = [block.begin for block in blocks], defaultdict[tuple[int, bool], dict[int, int]](dict)
    for call in calls:
        number = bisect_right(begins, call.begin)  # of the blocks that have begun
        piece = pieces[number, number > 0 and call.begin <= blocks[number - 1].end]
        own = model.get_submodule(call.name).parameters(recurse=False)
        piece.update({id(parameter): parameter.numel() for parameter in own})
    return max([sum(piece.values()) for piece in pieces.values()])


def _size(model: nn.Module, run: Sequence[ModuleCall]) -> int:
    return sum(_all_size(model.get_submodule(name)) for name in {call.name for call in run})


def _all_size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _begin(call: ModuleCall) -> int:
    return call.begin


def _links(run: Iterable[ModuleCall]) -> list[list[ModuleCall]]:
    """Calls in groups, as long as each is called with something that the one before returned."""
    links: list[list[ModuleCall]] = []
    for call in run:
        if links and _shared(links[-1][-1], call):
            links[-1].append(call)
        else:
            links.append([call])
    return links


def _shared(earlier: ModuleCall, later: ModuleCall) -> list[tuple[int, ArgumentKey]]:
    """The leaves of what one returned that are leaves of the other's arguments."""
    return [
        (place, later.argument_keys[state])
        for place, state in enumerate(earlier.output_states)
        if state in later.argument_keys
    ]
