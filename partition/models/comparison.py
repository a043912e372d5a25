"""The comparison of a model with its parts, on the sample: outputs, gradients, in eval and in train mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from partition.errors import PartitionError
from partition.models.as_found import as_found
from partition.models.calls import (
    SHARES,
    ModelRecord,
    equal,
    forward_is_call,
    near,
    run_model,
    same_numbers,
    training,
)
from partition.models.inputs import Leaves
from partition.models.parts import Block, Part
from partition.names import OF_EVERY_MODULE
from partition.opaque import opaque, remedy, type_name
from partition.precision import float32_in_full
from partition.randomness import drawing, generators_left, seed_host

_PIECE = 2**12  # numbers of a gradient of which one is made
_SMALLEST_SHARE = 1e-3  # of the largest gradient: those of a module that are smaller are compared as if they had that
_REMEDY = "Give a sample, and a dtype, in which the model alone can be trained."
_OUTSIDE = (
    "its forward reads what changes from call to call outside of the model (a global, a closure), or something between "
    "two blocks is in no part. Hand that over with the inputs, name other blocks, "
    "to_sequential(model, sample, blocks=[...]), or write the model as an nn.Sequential."
)


class UnfitModelError(PartitionError):
    """A model that no way to cut it fits: alone, on its sample, it returns what cannot be compared."""


@float32_in_full()
def check_layers(
    record: ModelRecord, layers: nn.Sequential, make: Callable[[Any], Any], part_names: Collection[str]
) -> None:
    """See that the layers compute what the model computes, in eval mode and in train mode.

    Both are seeded anew where each block is called: in a Pipe each layer draws under a seed of its own.

    Args:
        record: of the model on the sample.
        layers: its parts.
        make: what is made of what the model returns.
        part_names: the names of the modules that no part has a copy of, beside the blocks.

    Raises:
        PartitionError: they do not; or no part has what the model counts, which may count in later calls.
    """
    model, kind = record.model, type(record.model).__name__
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unsaved = model.state_dict().keys() - layers.state_dict().keys()
    if unsaved:
        raise PartitionError(
            f"{kind}: its state_dict has {', '.join(sorted(unsaved)[:5])}, which no part would save: a module that "
            "contains blocks has extra state, or a state_dict of its own. Let a module that contains none have it."
        )
    inner = _modules_of_one_part(model, layers, part_names)
    drawn = [name for name in record.drawn if id(model.get_submodule(name.rpartition(".")[0])) not in inner]
    if drawn:
        raise PartitionError(keeps(model, drawn))
    with torch.enable_grad():
        _compare_in_mode(record, layers, make, names, in_training=False)
        with training(model, layers):
            _compare_in_mode(record, layers, make, names, in_training=True)
            counted = _counted(record, make, inner)
    if counted:
        raise PartitionError(keeps(model, counted))


def _compare_in_mode(
    record: ModelRecord, layers: nn.Sequential, make: Callable[[Any], Any], names: Mapping[int, str], in_training: bool
) -> None:
    """The same, in one mode, which both are in."""
    model, kind = record.model, type(record.model).__name__
    expected, attributes = _called(record, layers, partial(_made, record, make), [record.sample])
    if not in_training:
        _check_comparable(kind, expected)
    actual, _ = _called(record, layers, layers, [record.sample])
    (theirs, their_tree), (ours, tree) = tree_flatten(expected), tree_flatten(actual)
    if tree != their_tree:
        counts = [sum(isinstance(leaf, Tensor) for leaf in leaves) for leaves in (theirs, ours)]
        raise PartitionError(
            f"{kind} returns {counts[0]} tensors on the sample, and its parts {counts[1]}, or other containers of "
            "them. What hooks within blocks collect is in no part, nor what hooks of a script do: leave "
            "output_attentions out of the sample, say, or choose with output=..."
        )
    if not all(map(equal, ours, theirs)):
        when, furthest = "in train mode" if in_training else "on the sample", _furthest(ours, theirs)
        raise PartitionError(f"{kind} does not return {when} what its parts return{furthest}: {_OUTSIDE}")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _compare_grads(f"{kind} in train mode" if in_training else kind, ours, theirs, parameters, names)
    if any([record.runs[in_training].draws_before(block.in_model.names) for block in _blocks(layers)[:1]]):
        _compare_host_draws(record, layers, make)
    if attributes:
        _compare_next(record, layers, make, attributes)


def _compare_host_draws(record: ModelRecord, layers: nn.Sequential, make: Callable[[Any], Any]) -> None:
    """See that what Python and numpy draw before the first block is used before it alone, or travels.

    A number that decides something may decide the same under two seeds, but not at either end of its range.

    Raises:
        PartitionError: another part uses it.
    """
    for first in range(len(SHARES)):
        with torch.no_grad():
            theirs, ours = [
                _called(record, layers, run, [record.sample], first, (SHARES[first], SHARES[first - 1]))[0]
                for run in (partial(_made, record, make), layers)
            ]
        if not same_numbers(ours, theirs):
            raise PartitionError(
                "random numbers that Python or numpy draws before the first block are used behind it, and another part "
                "draws others. Draw them by torch in a module of its own: what that returns travels."
            )


def _check_comparable(kind: str, expected: Any) -> None:
    """See that what a model returns can be compared, and joined from chunks.

    Raises:
        UnfitModelError: it cannot.
    """
    leaves = tree_leaves(expected)
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves):
        raise UnfitModelError(
            f"{kind} returns a single number, a loss say, and those of chunks cannot be joined. Leave labels "
            "out of the sample, and give them to step(x, labels, loss_fn=...); or choose with output=..."
        )
    for leaf in opaque(leaves):
        raise UnfitModelError(
            f"{kind} returns a {type_name(leaf)}, and nothing sees what is in it: {remedy(leaf)}; or take them out "
            "of it with output=lambda returned: ..."
        )
    if any(isinstance(leaf, Tensor) and bool(leaf.isnan().any()) for leaf in leaves):
        raise UnfitModelError(f"{kind} itself returns NaN on the sample, which tells nothing. {_REMEDY}")


def _compare_next(
    record: ModelRecord, layers: nn.Sequential, make: Callable[[Any], Any], attributes: Iterable[str]
) -> None:
    """See that they return the same behind another call: what one call keeps may count in the next.

    Raises:
        PartitionError: they do not.
    """
    other_sample = tree_map_only(Tensor, lambda leaf: leaf / 2 if leaf.is_floating_point() else leaf, record.sample)
    with torch.no_grad():
        theirs, ours = [
            _called(record, layers, run, [other_sample, record.sample])[0]
            for run in (partial(_made, record, make), layers)
        ]
    if not same_numbers(ours, theirs):
        raise PartitionError(keeps(record.model, attributes))


def _modules_of_one_part(model: nn.Module, layers: nn.Sequential, part_names: Collection[str]) -> set[int]:
    """The ids of the modules that one part has and no other: what they keep, they keep as in the model."""
    parts = [layer for layer in layers if isinstance(layer, Part)]
    counts = Counter([name for part in parts if not isinstance(part, Block) for name in part.in_model.names])
    single = [
        name for part in parts for name in part.in_model.names
        if isinstance(part, Block) or name in part_names and counts[name] == 1
    ]  # fmt: skip
    return {id(module) for name in single for module in model.get_submodule(name).modules()}


def _counted(record: ModelRecord, make: Callable[[Any], Any], inner: Container[int]) -> list[str]:
    """The names of attributes of modules that are not in one part alone, with numbers that each call changes."""
    model = record.model
    if not record.volatile and not record.filled:
        return []
    found: list[dict[str, list[Any]]] = []
    with torch.no_grad(), as_found([model], record.written):
        for _ in range(2):
            seed_host(0)
            _made(record, make, record.sample)
            found.append({
                f"{name}.{key}" if name else key: [leaf for leaf in tree_leaves(value) if isinstance(leaf, int | float)]
                for name, module in model.named_modules() if id(module) not in inner
                for key, value in vars(module).items() if key not in OF_EVERY_MODULE
            })  # fmt: skip
    first, second = found
    return [name for name in first if any([one != other for one, other in zip(first[name], second.get(name, ()))])]


def keeps(model: nn.Module, names: Iterable[str]) -> str:
    """The words for a model whose forward keeps some attributes from one call to the next."""
    return (
        f"the forward of {type(model).__name__} keeps {', '.join(map(repr, names))} from one call to the next, and "
        "each part runs that forward. Let a module of its own, that is called once, keep it."
    )


def _made(record: ModelRecord, make: Callable[[Any], Any], x: Any) -> Any:
    """The value that is made of what the model returns."""
    return make(run_model(record.model, x, record.always, record.written))


def _called(
    record: ModelRecord, layers: nn.Sequential, run: Callable[[Any], Any], xs: Iterable[Any], first: int = 0,
    shares: Sequence[float] = (),
) -> tuple[Any, list[str]]:  # fmt: skip
    """The value of the last of some calls of the model or its parts, seeded alike; the attributes that change.

    Args:
        record, layers: the model, and its parts.
        run: either.
        xs: what it is called with.
        first: the first seed.
        shares: what Python and numpy draw before the first block, and from there on, see `drawing`; none: what they
            draw under the seeds.
    """
    blocks = {block.block for block in _blocks(layers)}  # the model's own, in either
    with as_found([record.model, layers], record.written) as snapshot:
        for x in xs:
            with _seeded(blocks, first, shares):
                value = run(x)
        return value, snapshot.changed({key for key, is_done in record.volatile.items() if is_done})


def _blocks(layers: nn.Sequential) -> list[Block]:
    return [layer for layer in layers if isinstance(layer, Block)]


@contextmanager
def _seeded(blocks: Iterable[nn.Module], first: int, shares: Sequence[float]) -> Iterator[None]:
    """Within: the generators are seeded, and seeded anew where each block is called."""
    seeds = count(first)
    with ExitStack() as stack:

        def seed(*_: Any) -> None:
            number = next(seeds)
            seed_host(number)
            if shares:
                stack.enter_context(drawing(shares[number > first]))

        for block in blocks:
            stack.enter_context(forward_is_call(block))
            stack.callback(block.register_forward_pre_hook(seed).remove)
        seed()
        yield


def _compare_grads(
    kind: str, ours: Leaves, theirs: Leaves, parameters: Sequence[Tensor], names: Mapping[int, str]
) -> None:
    try:  # the model may keep what it computed of parameters, so that both go back through one graph
        expected = _shrunk_grads(theirs, parameters, retain=True)
    except RuntimeError as error:
        raise UnfitModelError(f"{kind} itself has no gradients on the sample: {error} {_REMEDY}") from None
    gradients = _shrunk_grads(ours, parameters)
    sizes = {key: float(gradient.abs().max()) if gradient.numel() else 0.0 for key, gradient in expected.items()}
    # The gradient of a bias, or of a module whose output a norm takes away, may be nothing but rounding.
    largest = defaultdict[str, float](lambda: _SMALLEST_SHARE * max(sizes.values(), default=0.0))
    for key, size in sizes.items():
        largest[_owner(names[key])] = max(largest[_owner(names[key])], size)
    for key, name in [(id(parameter), names[id(parameter)]) for parameter in parameters]:
        actual, reference = gradients.get(key), expected.get(key)
        if actual is None and reference is None:
            continue
        if actual is None or reference is None or not near(actual, reference, largest[_owner(name)]):
            if reference is not None and not reference.isfinite().all():
                raise PartitionError(f"{kind}: the gradient of {name} is not finite on the sample. {_REMEDY}")
            raise PartitionError(
                f"{kind}: the gradient of {name} is not that of the model: something between two blocks is not in the "
                "parts, a hook, a function of autograd, or a switch around blocks that goes by the mode "
                "(torch.set_grad_enabled(self.training)). Put it into a block, name other blocks, "
                "to_sequential(model, sample, blocks=[...]), or write the model as an nn.Sequential."
            )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _shrunk_grads(leaves: Leaves, parameters: Sequence[Tensor], retain: bool = False) -> dict[int, Tensor]:
    """The gradients, shrunk as they come, by the id of the parameter: those of all would take the model's memory."""
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    shrunk: dict[int, Tensor] = {}

    def note(parameter: Tensor, gradient: Tensor) -> Tensor:
        shrunk[id(parameter)] = _shrunk(gradient.to_dense())
        return gradient if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

    with ExitStack() as stack, generators_left({root.device for root in roots}):
        seed_host(0)  # a backward may draw, too
        # Numbers of a shape, not of a layout in memory: outputs of parts may have another.
        weights = [torch.randn(root.shape, dtype=root.dtype, device=root.device) for root in roots]
        for parameter in parameters:
            stack.callback(parameter.register_hook(partial(note, parameter)).remove)
        if roots and parameters:
            torch.autograd.grad(roots, parameters, weights, retain_graph=retain, allow_unused=True)
    return shrunk


def _shrunk(gradient: Tensor) -> Tensor:
    """A gradient; of a large one a sum for each piece, weighted at random, and the rest."""
    flat = gradient.flatten()
    length = len(flat) // _PIECE * _PIECE
    weights = torch.randn(_PIECE, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(gradient)
    return torch.cat([flat[:length].view(-1, _PIECE) @ weights, flat[length:]])


def _furthest(ours: Leaves, theirs: Leaves) -> str:
    gaps = [
        float((our_leaf - their_leaf).detach().abs().max()) for our_leaf, their_leaf in zip(ours, theirs, strict=False)
        if isinstance(our_leaf, Tensor) and isinstance(their_leaf, Tensor) and our_leaf.shape == their_leaf.shape
    ]  # fmt: skip
    return f" (the furthest number is {max(gaps):.1e} away)" if gaps else ""
