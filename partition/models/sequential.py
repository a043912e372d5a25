"""A model that calls blocks one after the other, as an nn.Sequential of its own modules.

    model, sample ─► runs, watched ─► BlockChain: how a hidden state goes on ─► Outline, Beginning, Block ..., End
                      └─► Flow ─┬─► what is called and read before, between and after chains
                                └─► what is carried to all blocks of a chain, or passes blocks by
    compared with the model on the sample: outputs, gradients, what each block is called with

Nothing is traced: each part runs the model's own forward (`partition.models.outline`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter

from partition.compilation import uncompiled
from partition.errors import PartitionError
from partition.models.as_found import Hook
from partition.models.calls import ModelRecord, ModelRun, ModuleCall, draws_behind, draws_matter, record_model
from partition.models.carrying import AbsentUnitsError, LostValueError, NotCarriedError, passing_of
from partition.models.chains import broken_links, called_again, chains_of, found_blocks, named_blocks, outermost_calls
from partition.models.comparison import UnfitModelError, check_layers
from partition.models.inputs import ModelInputs, UnsentInputError
from partition.models.outline import Outline
from partition.models.parts import Beginning, Block, End, Middle
from partition.models.passing import PassingPlan
from partition.models.runs import BlockChain, chain_of, containers_of, names_of
from partition.models.shapes import MadeUpBuffer, form_in_memory
from partition.models.shares import phases_of, shares_of, unit_of
from partition.models.sources import Sources
from partition.models.stand_ins import rebuilt
from partition.models.twin import twin_of
from partition.modes import Modes, modes_kept
from partition.names import ModelLayers
from partition.opaque import may_change, opaque, remedy, type_name
from partition.randomness import generators_left
from partition.splitting import check_shaped


def to_sequential(
    model: nn.Module,
    sample: Any,
    *,
    blocks: str | Sequence[str] | None = None,
    output: Callable[[Any], Any] | None = None,
) -> nn.Sequential:
    """A model as an nn.Sequential of its beginning, its blocks and its end, which a Pipe can cut.

    The layers hold the model's own modules and parameters: what trains the one trains the other, and
    `model.state_dict()` or `model.save_pretrained(...)` saves it. Either may be told its mode, `train()` or `eval()`;
    copies of the layers are of no model. The names are those of the model,
    "model.layers.2.mlp.up_proj.weight", and so is their order.

    The model's own forward is run in each part, with its blocks replaced. Before it is returned, the nn.Sequential is
    compared with the model on the sample: outputs to the bit, seeded alike, in eval mode and in train mode; gradients
    nearly.

    A model on the meta device is cut as well, and stays there. What has no numbers gets made-up ones while it is
    compared, which take the memory of its largest parameter. Only what a state_dict has may be without numbers: build
    the model under `pipeline.meta_parameters()`.

    Args:
        model: any module that calls modules one after the other: blocks, each on what the one before returned, once or
            again and again, or a U-Net, or with something computed between them. Models of Hugging Face's transformers
            are called with `use_cache=False`.
        sample: what it is called with: a dict of keyword arguments, a tuple of positional ones, or a tensor; rows along
            dim 0. Afterwards the nn.Sequential, or a Pipe, is called with one such value.
        blocks: the names of the blocks, or of containers whose children they are. None: the longest chain of blocks of
            one type, and others beside it, of an encoder and a decoder; or else all modules that are called once.
        output: what to make of what the model returns. None: a mapping becomes a dict of its entries that are not None.

    Returns:
        Layers: the beginning, each block, the end; and what the model computes between two blocks, where the one is not
        just called with what the other returned.

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
        ['embed.weight', 'head.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    if "_orig_mod" in model._modules:
        raise PartitionError(
            f"the model is compiled as a whole ({type(model).__name__}, by torch.compile). Give model._orig_mod, and "
            "compile its blocks: block.compile()."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module.state_dict():
            raise PartitionError(
                f"module {name!r} is compiled by torch.jit and has parameters or buffers: nothing can stand in for it. "
                "Cut the model before it is compiled."
            )
    check_shaped(model)
    for module in model.modules():
        for key, child in module._modules.items():
            if child is not None and not isinstance(getattr(module, key), nn.Module):
                raise PartitionError(
                    f"{type(module).__name__} keeps a module under the name of its method {key!r}: nothing finds it. "
                    "Give it another name."
                )
    if output is not None and not callable(output):
        raise PartitionError(
            f"output is {output!r}, which is not callable. Give a function of what the model returns, such as "
            "lambda out: out.logits."
        )
    sample = dict(sample) if isinstance(sample, Mapping) else sample
    twin = twin_of(model, sample)
    if twin is not None:
        cut = to_sequential(twin.model, sample, blocks=blocks, output=output)
        return _of(model, twin.returned(cut))
    leaves = [*model.parameters(), *model.buffers(), *tree_iter(sample)]
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    with generators_left(devices), modes_kept(model.modules()), uncompiled():
        model.eval()
        layers = _first_cut(model, sample, blocks, output or _plain)
    return _of(model, layers)


def _first_cut(
    model: nn.Module, sample: Any, names: str | Sequence[str] | None, output: Callable[[Any], Any]
) -> nn.Sequential:
    """The layers of the first way to cut that fits.

    Raises:
        PartitionError: none does; the words are those of the last that was compared, which asks least of a model.
    """
    record = record_model(model, sample, output)
    try:
        return _first_that_fits(record, names, output)
    except PartitionError as error:
        calls = record.in_eval_mode.calls
        for leaf in opaque([leaf for call in calls for leaf in call.returned[0]]):
            error.add_note(f"Modules of it return a {type_name(leaf)}, and nothing sees what is in it: {remedy(leaf)}.")
        for leaf in filter(may_change, opaque([leaf for call in calls for leaf in call.arguments.leaves.values()])):
            kind = type_name(leaf)
            error.add_note(f"Modules of it are called with a {kind}: what one writes there, others do not see.")
        raise


def _first_that_fits(
    record: ModelRecord, names: str | Sequence[str] | None, output: Callable[[Any], Any]
) -> nn.Sequential:
    model, calls = record.model, record.in_eval_mode.calls
    ways = [named_blocks(model, names, calls)] if names is not None else found_blocks(model, calls)
    errors: list[PartitionError] = []
    for blocks in ways:
        has_hooks = any(id(model.get_submodule(call.name)) in record.hooks for call in blocks)
        for hooks in ({}, record.hooks) if has_hooks else ({},):  # what they collect may be read by no one
            try:
                return _cut(record, blocks, output, hooks)
            except UnfitModelError:
                raise
            except PartitionError as error:
                errors.append(error)
    raise next((error for error in reversed(errors) if error.__cause__ is None), errors[-1])


def _cut(
    record: ModelRecord, blocks: Sequence[ModuleCall], output: Callable[[Any], Any], hooks: Mapping[int, Sequence[Hook]]
) -> nn.Sequential:
    """The layers, compared with the model; stand-ins for blocks have some hooks.

    Raises:
        PartitionError: they compute something else.
    """
    model, sample, always, volatile = record.model, record.sample, record.always, record.volatile
    leaves, tree = tree_flatten(sample)
    names = tuple(sample) if isinstance(sample, Mapping) else None
    read = tuple([not isinstance(leaf, Tensor) for leaf in leaves])
    written = tuple([any(leaf is tensor for tensor in record.written) for leaf in leaves])
    inputs = ModelInputs(names, tree, always, read, written)
    own = {*map(id, record.written), *map(id, record.filled)}
    try:
        blocks, chains, shares, part_names, passing = _divided(record, blocks)
        shaping = _shaping(chains, passing, blocks)
        block_calls = [called_again(run.calls, blocks) for run in record.runs]
        passing = passing._replace(
            draws=tuple([_drawing_again(record, run, blocks, chains, shares, part_names) for run in record.runs]),
            writers=frozenset([number for calls in block_calls for number, call in enumerate(calls) if call.writes]),
            told=_told(record, chains, part_names),
        )
        while True:
            outline = Outline(model, chains, inputs, part_names, volatile, passing, shaping, hooks, own)
            layers = _layers(model, outline, shares, output)
            try:
                check_layers(record, layers, output, part_names)
                return layers
            except UnsentInputError as error:
                read = tuple([is_read or number == error.leaf for number, is_read in enumerate(read)])
                inputs = inputs._replace(read=read)
    except PartitionError:
        raise
    except Exception as error:
        raise PartitionError(
            f"{type(model).__name__}'s forward does not run without its blocks: {type(error).__name__}: {error}. "
            f"{_hint(record, blocks)}Cut it by hand, as an nn.Sequential."
        ) from error


def _hint(record: ModelRecord, blocks: Sequence[ModuleCall]) -> str:
    """Words for what may stand in the way where a forward does not run without its blocks."""
    within = tuple([f"{block.name}." for block in blocks])
    modules = [name for name, module in record.model.named_modules() if id(module) in record.hooks]
    hooked = [name for name in modules if name.startswith(within)]
    if hooked:
        return f"Hooks collect what {', '.join(hooked[:3])} return: turn that off, or name such modules as the blocks. "
    packing = dict.fromkeys([call.name for call in record.in_eval_mode.calls if _is_packed(call.returned[1])])
    if packing:
        return (
            f"{', '.join([*packing][:3])} returned a PackedSequence, whose lengths another part than its own does not "
            "have. Let one module pack, call it and unpack; or name modules that run before it as the blocks, "
            "to_sequential(model, sample, blocks=[...]). "
        )
    ids = set(map(id, record.written))
    written = [name for name, parameter in record.model.named_parameters() if id(parameter) in ids]
    return f"It writes {', '.join(written[:3])} in its forward: turn that off. " if written else ""


def _is_packed(tree: TreeSpec) -> bool:
    """Whether a value of this structure holds a PackedSequence."""
    return tree.context is PackedSequence or any(map(_is_packed, tree.children()))


def _divided(
    record: ModelRecord, blocks: Sequence[ModuleCall]
) -> tuple[Sequence[ModuleCall], tuple[BlockChain, ...], list[dict[str, Any]], list[str], PassingPlan]:
    """The blocks, their chains, the shares of what is around them, the modules with parameters there, what passes by.

    A block that is called with more than its chain's first block and the hidden state begins another. What one part has
    computed of a parameter alone, and another reads, both compute; what a module of one returned that is called once
    makes the module a block. One that is called in train mode alone, an auxiliary head, is in the end.
    """
    given: frozenset[tuple[int, str]] = frozenset()
    model, begins = record.model, broken_links(record.model, blocks, [run.calls for run in record.runs])
    _check_draws(record, {block.name for block in blocks})
    while True:
        chains = chains_of(blocks, begins)
        _check_containers(record, chains)
        runs = [run for run in record.runs if called_again(run.calls, blocks)]
        phases = phases_of(model, runs, chains)
        for part, name in given:
            phases.add(part, unit_of(model, name))
        shares, part_names = shares_of(model, chains, phases, record.volatile)
        items = [item for share in shares for item in share.items()]
        unit_names = {*part_names, *[name for name, unit in items if isinstance(unit, nn.Parameter | MadeUpBuffer)]}
        sources = [Sources(model, run, called_again(run.calls, blocks), unit_names) for run in runs]
        try:
            return blocks, chains, shares, part_names, passing_of(chains, shares, sources)
        except NotCarriedError as error:
            if any(chain.first == error.number for chain in chains):
                raise
            begins, given = begins | {error.number}, frozenset()
        except AbsentUnitsError as error:
            if error.units <= given:
                raise
            given |= error.units
        except LostValueError as error:
            calls = outermost_calls(record.in_eval_mode.calls, error.names)
            others = [block for block in blocks if not any(_are_nested(call, block) for call in calls)]
            if not calls:
                others = _before(blocks, error.names, record.in_train_mode.calls)
            if not calls and not others:
                raise
            return _divided(record, sorted([*others, *calls], key=lambda call: call.begin))


def _before(blocks: Sequence[ModuleCall], names: Container[str], calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The blocks before modules that are called in train mode alone, so are none: of the end, as all behind them."""
    begin = min([call.begin for call in calls if call.name in names], default=0)
    pairs = zip(blocks, called_again(calls, blocks), strict=False)
    return [block for block, trained in pairs if trained.end < begin]


def _are_nested(one: ModuleCall, other: ModuleCall) -> bool:
    """Whether one of two calls lies within the other, or a module within the other's."""
    names = f"{one.name}.", f"{other.name}."
    are_modules = any(name.startswith(within) for name, within in (names, names[::-1]))
    return are_modules or one.begin < other.end and other.begin < one.end


def _check_draws(record: ModelRecord, names: Collection[str]) -> None:
    """See that Python and numpy draw no numbers that matter behind the first block, outside of blocks.

    Raises:
        PartitionError: they do.
    """
    for run in record.runs:
        calls = [call for call in run.calls if call.name in names]
        draws = draws_behind(run.draw_times, calls)
        if draws and draws_matter(record, names):
            places = [f"before block {call.name!r}" for call in calls if call.begin >= draws[0]]
            raise PartitionError(
                f"random numbers of Python or numpy are drawn {(*places, 'behind the last block')[0]}, to drop layers, "
                "say. Each part would draw them again: turn that off, or draw before the first block, or in a block."
            )


def _check_containers(record: ModelRecord, chains: Sequence[BlockChain]) -> None:
    """See that no module that contains blocks writes what it has, or tells a hook the gradients of its input.

    Raises:
        PartitionError: one does.
    """
    for name in containers_of(record.model, chains):
        module = record.model.get_submodule(name)
        if module._backward_hooks:
            raise PartitionError(
                f"{type(module).__name__}, which contains blocks, has a backward hook, and no part runs it from its "
                "input to its output. Hooks on blocks and on what is in them work, and full_backward_pre_hooks."
            )
        for key in (*module._parameters, *module._buffers):
            if (id(module), key) in record.volatile:
                kind = "parameter" if key in module._parameters else "buffer"
                raise PartitionError(
                    f"the forward of {type(module).__name__}, which contains blocks, writes its {kind} {key!r}, "
                    "and each part would write it again. Move it into a module of its own."
                )


def _drawing_again(
    record: ModelRecord, run: ModelRun, blocks: Sequence[ModuleCall], chains: Sequence[BlockChain],
    shares: Sequence[Mapping[str, Any]], part_names: Collection[str],
) -> frozenset[int]:  # fmt: skip
    """The numbers of the chains behind which a part draws again what was drawn before the last block, in one mode.

    It does where the model's own forward draws, a module of its own, or one that all parts have, in eval mode.
    """
    containers = containers_of(record.model, chains)
    lost = {*part_names, *[block.name for block in blocks]}
    numbers: set[int] = set()
    for number, chain in enumerate(chains):
        of_run, in_eval_mode = [
            _drawing_modules(one, containers, block_calls[chain.last].begin if chain.last < len(block_calls) else -1)
            for one in (run, record.in_eval_mode) for block_calls in [called_again(one.calls, blocks)]
        ]  # fmt: skip
        if of_run & {"", *shares[number + 1]} or in_eval_mode - lost:
            numbers.add(number)
    return frozenset(numbers)


def _drawing_modules(run: ModelRun, containers: Container[str], until: int) -> set[str]:
    """The names of the modules that drew before a time and contain no blocks; "" of the model's own forward."""
    calls = [call for call in run.calls if call.name not in containers]
    times = {*[node.time for node in run.flow.nodes if node.drawn], *[time - 1 for time in run.draw_times]}
    return {
        next((call.name for call in calls if call.begin <= time < call.end), "")
        for time in times if time < until
    }  # fmt: skip


def _told(record: ModelRecord, chains: Sequence[BlockChain], part_names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The attributes of modules in parts that modules which contain blocks read, by the names of both.

    Raises:
        PartitionError: modules in parts read what the forward of one that contains blocks sets.
    """
    model = record.model
    containers = {id(model.get_submodule(name)): name for name in containers_of(model, chains)}
    tops = [model.get_submodule(name) for name in (*part_names, *[name for chain in chains for name in chain.blocks])]
    names = {id(module): name for name, module in model.named_modules()}
    inner = {id(module): module for top in tops for module in top.modules()}
    told: list[tuple[str, str]] = []
    for owner, key, reader in sorted(record.reads):
        if owner in containers and reader in inner and (owner, key) in record.volatile:
            raise PartitionError(
                f"module {names[reader]!r} reads {key!r} of {type(model.get_submodule(containers[owner])).__name__}, "
                "whose forward sets it, and which contains blocks: no part sets it for the others. Hand it over as an "
                "argument."
            )
        tables = () if owner not in inner else (inner[owner]._modules, inner[owner]._parameters, inner[owner]._buffers)
        is_done = record.volatile.get((owner, key), False)
        if tables and reader in containers and not is_done and not any(key in table for table in tables):
            told.append((names[owner], key))
    return tuple(dict.fromkeys(told))


def _shaping(chains: Sequence[BlockChain], passing: PassingPlan, blocks: Sequence[ModuleCall]) -> set[int]:
    """The blocks that return more than the hidden state in its layout, where more than blocks sees what they return."""
    is_seen = len(chains) > 1 or any(passing.until)
    return {
        number for number, block in enumerate(blocks)
        if is_seen and not _returns_hidden_state(block, chain_of(chains, number))
    }  # fmt: skip


def _returns_hidden_state(block: ModuleCall, chain: BlockChain) -> bool:
    leaves = block.returned[0]
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    return tensors == sorted(chain.exits) and all(
        _layout(leaves[place]) == _layout(block.arguments[key])
        for place, key in zip(chain.exits, chain.entries, strict=True)
    )  # fmt: skip


def _layout(value: Any) -> tuple[Any, ...] | None:
    return form_in_memory(value) if isinstance(value, Tensor) else None


def _layers(
    model: nn.Module, outline: Outline, shares: Sequence[Mapping[str, Any]], output: Callable[[Any], Any]
) -> nn.Sequential:
    placed_names: set[str] = set()
    blocks = tuple([f"{block}." for chain in outline.chains for block in chain.blocks])
    names = names_of(model)
    layers: list[nn.Module] = []
    for number, share in enumerate(shares):
        others_names = [name for name in share if name in placed_names or name.startswith(blocks)]
        copied_names = [name for name in others_names if isinstance(share[name], nn.Module)]
        copies = {name: rebuilt(share[name], lambda tensor: tensor) for name in copied_names}  # of the same parameters
        outline.lead(
            [pair for name in copied_names for pair in zip(share[name].modules(), copies[name].modules(), strict=True)]
        )
        placed_names.update(share)
        units = {**share, **copies}
        if number == len(outline.chains):
            layers.append(End(outline, units, number, output))
            break
        layers.append((Middle if number else Beginning)(outline, units, number))
        chain = outline.chains[number]
        for index, block in enumerate(map(model.get_submodule, chain.blocks), chain.first):
            layers.append(Block(outline, index, names[id(block)], block))
    return _of(model, layers)


def _of(model: nn.Module, layers: Iterable[nn.Module]) -> ModelLayers:
    """Layers that hold what is the model's. What stands for one of its modules, a copy too, is in the mode of that."""
    layers = list(layers)
    container = ModelLayers(*layers, modes=Modes(model, layers))
    container.training = model.training
    return container


def _plain(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        return {name: value for name, value in returned.items() if value is not None}
    return returned
