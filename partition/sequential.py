"""A model that is a beginning, a run of blocks and an end, as an nn.Sequential of its own modules.

    model, sample ─► runs, watched ─► Chain: blocks that hand a hidden state on ─► Outline, Beginning, Block ..., End
                                     └─► what is called and read before, between and after them
    compared with the model on the sample: outputs, gradients, what each block is called with

Nothing is traced: each part runs the model's own forward (`partition.outline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from partition.calls import Called, all_calls, always_of, in_eval_mode, volatile_of
from partition.chains import chains_of, found_chains, named_chain
from partition.comparison import compare, compare_in_train_mode, same
from partition.errors import PartitionError
from partition.outline import Chain, Inputs, Key, Leaves, Outline, UnreadError, Volatile, around, rebuilt
from partition.parts import Beginning, Block, End, Holder, Middle, Part
from partition.shares import phases_of, shares_of


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
    always = always_of(model, sample)
    with in_eval_mode(model), torch.random.fork_rng():
        volatile = volatile_of(model, sample, always)
        calls = all_calls(model, sample, always)
        choices = [named_chain(model, blocks, calls)] if blocks is not None else found_chains(model, calls)
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
    runs: Sequence[Sequence[Called]],
    output: Callable[[Any], Any],
) -> nn.Sequential:
    """The layers, compared with the model.

    Raises:
        PartitionError: they compute something else.
    """
    chains = chains_of(runs)
    phases = phases_of(model, sample, always, chains)
    shares, apart = shares_of(model, chains, phases)
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
                compare(model, layers, sample, always, output)
                compare_in_train_mode(model, layers, sample, always, output)
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


def _carrying(outline: Outline, chain: Chain, run: Sequence[Called], leaves: Leaves) -> Chain:
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
        others = [key for key in theirs.keys if key not in chain.entries and not same(ours[key], theirs[key])]
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


def _is(one: Any, other: Any) -> bool:
    """Whether two values hold the same tensors, and there are some."""
    ours, theirs = tree_leaves(one), tree_leaves(other)
    are = len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
    return are and any(isinstance(leaf, Tensor) for leaf in ours)


def _plain(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        return {name: value for name, value in returned.items() if value is not None}
    return returned
