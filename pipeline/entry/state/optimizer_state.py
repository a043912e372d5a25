"""The state of an optimizer by the names of parameters, so that it loads wherever the parameters are.

    optimizer.state_dict()   parameters by number, in the order of this process's groups
          |  ^
          v  |
    "state.<name>.exp_avg"           the optimizer's entry for a parameter
    "state_keys.<name>"              the names of these entries; empty for a parameter that was never stepped
    "param_groups.<name>.lr"         the options of its group

Every key has the name of one place of a parameter in it, so the dicts of several ranks are parts of one, and no two
ranks write the same key. But for "state_keys" it is what torch's get_optimizer_state_dict makes with
StateDictOptions(flatten_optimizer_state_dict=True).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.common.arguments import check_optimizer, few
from pipeline.entry.state.saved import Saved
from pipeline.gradients.per_parameter import params_of

NOT_OPTIONS = ("params", "param_names")  # of a group: its parameters, which names stand for


def optimizer_state(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer by the names of its parameters, in one flat dict.

    For a parameter that an optimizer of torch.optim has not stepped yet there are values too, which only make places
    that torch.distributed.checkpoint.load can fill; "state_keys.<name>" says that they mean nothing. As with
    `optimizer.state_dict()` the tensors are the optimizer's own, not copies.

    Args:
        named_parameters: this process's, a tied one under all its names; and those, named "", for which nothing is
            saved: empty ones, where an optimizer must have some, and those that other processes train.
        optimizer: of some or all of them.

    Raises:
        ValueError: the optimizer has a parameter without a name, or keeps what belongs to no one parameter (L-BFGS).
        TypeError: it keeps values that cannot be saved by name.

    Example:
        >>> layer = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> state = optimizer_state(layer.named_parameters(), optimizer)
        >>> state["param_groups.weight.lr"], state["state_keys.weight"]
        (0.1, ())
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer_state(layer.named_parameters(), optimizer)["state.weight.momentum_buffer"]
        tensor([[1., 1.],
                [1., 1.]])
    """
    check_saveable(optimizer)
    names = _names_of(named_parameters)
    packed = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for number, group, param in numbered(optimizer, packed):
        param_names = names.get(id(param))
        if param_names is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {list(param.shape)} that is none of those named. Make the "
                "optimizer of pipe.parameters(), and another one for other parameters."
            )
        if param_names == [""]:
            continue
        state = dict(flattened(param_names[0], packed["state"].get(number, {})))
        saved = state or dict(flattened(param_names[0], _places_for(optimizer, group, param)))
        flat.update(entries_of(param_names, group, state, saved))
    return flat


def load_optimizer_state(
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Optimizer,
    state: Mapping[str, Any],
    all_names: Iterable[str] | None = None,
) -> None:
    """Load the state that `optimizer_state` saved, whatever ranks had the parameters then.

    It replaces the optimizer's earlier state. Only the values of own names are read. Tensors are taken over where they
    have the right type and device, as by `optimizer.load_state_dict`: do not load one dict into two optimizers.

    Args:
        named_parameters: this process's, as for `optimizer_state`.
        optimizer: of the same class, with groups that cut the parameters as the saved one's did, if not in that order.
        state: from `optimizer_state`, of this process or of all; or from torch's get_optimizer_state_dict, flattened.
        all_names: of the whole model's parameters. None: there are no others than this process's.

    Raises:
        ValueError: entries of parameters that no rank has or that the optimizer does not hold; parameters that the
            state does not know; options that differ within a group; state that was saved but is not here.

    Example:
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> state = optimizer_state(one.named_parameters(), torch.optim.Adam(one.parameters(), lr=0.5))
        >>> optimizer = torch.optim.Adam(other.parameters())
        >>> load_optimizer_state(other.named_parameters(), optimizer, state)
        >>> optimizer.param_groups[0]["lr"]
        0.5
    """
    check_saveable(optimizer)
    names = _names_of(named_parameters)
    entries = _entries(state, {name for param_names in names.values() for name in param_names if name}, all_names)
    packed = optimizer.state_dict()
    chosen = _chosen(optimizer, names, entries)
    packed["state"] = {
        number: nested for number, _, param in numbered(optimizer, packed) if (nested := chosen[id(param)].state)
    }
    for index, (group, param_group) in enumerate(zip(packed["param_groups"], optimizer.param_groups, strict=True)):
        named = [(names[id(param)][0], chosen[id(param)]) for param in param_group["params"]]
        group.update(_options(index, [(name, entry) for name, entry in named if name]))
    optimizer.load_state_dict(packed)


def own_part(
    state_dict: Mapping[str, Any], is_remote: Callable[[str], bool], first_names: Mapping[str, str] | None = None
) -> OrderedDict[str, Any]:
    """A state_dict of the whole model without the values of other ranks' layers, which are not read.

    Their keys stay, with None, so that loading still tells keys that belong to no layer.

    Args:
        state_dict: of the whole model; one that reads its values when asked (`pipeline.Saved`) reads few.
        is_remote: says of a key whether only other ranks have the layers of which it is.
        first_names: for every name of a parameter of the model its first one, in order. A tied parameter, of which
            files have one name, comes under each; where the state has several, as the last, as in the plain module.

    Example:
        >>> dict(own_part({"0.weight": 5, "1.weight": 7}, lambda key: key.startswith("1.")))
        {'0.weight': 5, '1.weight': None}
    """
    first_names = first_names or {}
    last_names = {first: name for name, first in first_names.items() if name in state_dict}
    tied = {name: last_names[first] for name, first in first_names.items() if first in last_names}
    part = OrderedDict(
        (key, None if is_remote(key) else state_dict[name])
        for key, name in {**{name: name for name in state_dict}, **tied}.items()
    )
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        part._metadata = versions  # type: ignore[attr-defined]  # where torch keeps it
    return part


# -------------------------------------------------------------------------------------------------------------- saving


def check_saveable(optimizer: Optimizer) -> None:
    """Raise unless this is an optimizer whose state has a part for each parameter."""
    check_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS keeps its history of all parameters as one, which cannot be saved by name. Save "
            "optimizer.state_dict(), which loads with the same parameters in one process."
        )


def _names_of(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in named_parameters:
        names[id(param)].append(name)
    return dict(names)


def numbered(optimizer: Optimizer, packed: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any], Tensor]]:
    """(number, group, parameter) in the packed state of an optimizer."""
    for param_group, group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for number, param in zip(group["params"], param_group["params"], strict=True):
            yield number, group, param
    check_numbers(packed)


def check_numbers(packed: Mapping[str, Any]) -> None:
    """Raise ValueError if a packed state of an optimizer has state under a number that no group has."""
    numbers = {number for group in packed["param_groups"] for number in group["params"]}
    others = [key for key in packed["state"] if key not in numbers]
    if others:
        raise ValueError(
            f"the optimizer keeps state that belongs to no parameter, under {others}. It cannot be saved or loaded by "
            "name: save optimizer.state_dict() on each rank, and load it at the same balance by "
            "optimizer.load_state_dict."
        )


def flattened(name: str, state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of an optimizer for a parameter, with dotted keys where dicts are nested."""
    for key, value in state.items():
        if not isinstance(key, str) or not key or "." in key:
            raise TypeError(f"the optimizer's state of {name!r} has the key {key!r}. Keys are words without dots.")
        if isinstance(value, Mapping):
            yield from flattened(name, value, f"{prefix}{key}.")
        elif isinstance(value, Tensor | bool | int | float) or value is None:
            yield prefix + key, value
        else:
            raise TypeError(
                f"the optimizer's state of {name!r} has a {type(value).__name__} under {prefix + key!r}. What is saved "
                "by name are tensors, numbers and None."
            )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: all but its parameters."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def entries_of(
    names: Iterable[str], group: Mapping[str, Any], state: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The entries of a parameter in a flat state, under each of its names.

    Args:
        names: all of them.
        group: that it is in.
        state: what the optimizer has for it, by dotted keys.
        saved: the same, or what only makes places.
    """
    for name in names:
        yield from [(f"state.{name}.{key}", value) for key, value in saved.items()]
        yield f"state_keys.{name}", tuple(sorted(state))
        yield from [(f"param_groups.{name}.{key}", value) for key, value in options_of(group).items()]


def _places_for(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
    """The entries that an optimizer of torch.optim has for a parameter after a first step: found by one, on a copy.

    Other optimizers may have side effects in a step, such as communication with other ranks; they get no places.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return {}
    zero = torch.zeros_like(param).requires_grad_()
    zero.grad = torch.zeros_like(param)
    if isinstance(optimizer, torch.optim.SparseAdam):
        zero.grad = zero.grad.to_sparse()
    trial = type(optimizer).__new__(type(optimizer))
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    options = {**group, "params": [zero]}
    trial.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": [options]})
    with torch.no_grad():
        unwrap(type(optimizer).step)(trial)  # without hooks, of which some are for all optimizers
    return state[zero]


# -------------------------------------------------------------------------------------------------------------- loading


_KINDS = ("state", "state_keys", "param_groups")  # the first parts of keys


class _SavedState(NamedTuple):
    """The saved entries of a name: the options of its group, and what the optimizer kept, nested as it was."""

    options: dict[str, Any]
    state: dict[str, Any]


def _saved_state(
    name: str, param_groups: Mapping[str, Any], state: Mapping[str, Any], state_keys: Mapping[str, Any]
) -> _SavedState:
    """The saved entries of a name, from those of each kind.

    Raises:
        ValueError: some are not there.
    """
    keys = state_keys.get("", state)
    absent = [key for key in keys if key not in state]
    if absent:
        raise ValueError(
            f"the state says that {name!r} had {absent}, which are not here. torch.distributed.checkpoint.load fills "
            "only what it is given places for; pipeline.Saved(path, 'optimizer') has all there is."
        )
    nested: dict[str, Any] = {}
    for key in [key for key in state if key in keys]:
        *outer, last = key.split(".")
        inner = nested
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = state[key]
    return _SavedState(options_of(param_groups), nested)


def _entries(
    state: Mapping[str, Any], own_names: Collection[str], all_names: Iterable[str] | None
) -> dict[str, _SavedState]:
    """The entries of a flat state for this process's names."""
    known_names = {*own_names, *(all_names or ())}
    own_keys: dict[str, tuple[str, str, str]] = {}  # (kind, name, state key) of each key that is this process's
    unknown = []
    for key in map(str, state):
        kind, _, rest = key.partition(".")
        name = _name_in(rest, known_names)
        if kind not in _KINDS or name is None:
            unknown.append(key)
        elif name in own_names:
            own_keys[key] = kind, name, rest.removeprefix(name).removeprefix(".")
    if unknown:
        raise ValueError(
            f"entries that belong to no parameter: {few(unknown)}. The state has the names of another "
            "model, or was not saved by name: it should come from pipe.optimizer_state_dict(optimizer)."
        )
    values = state.read(own_keys) if isinstance(state, Saved) else {key: state[key] for key in own_keys}
    by_kind: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: {kind: {} for kind in _KINDS})
    for key, (kind, name, state_key) in own_keys.items():
        by_kind[name][kind][state_key] = values[key]
    return {name: _saved_state(name, **kinds) for name, kinds in by_kind.items()}


def _name_in(rest: str, names: Collection[str]) -> str | None:
    """The name that a key begins with. No name begins with another one: a parameter has no parameters."""
    name = rest
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


def _chosen(
    optimizer: Optimizer, names: Mapping[int, list[str]], entries: Mapping[str, _SavedState]
) -> dict[int, _SavedState]:
    """The entry of each parameter that an optimizer holds, by id; a tied one's may stand under any of its names."""
    chosen: dict[int, _SavedState] = {}
    missing, held_names = [], set()
    for param in params_of(optimizer):
        param_names = names.get(id(param), [])
        held_names.update(param_names)
        if param_names == [""]:
            chosen[id(param)] = _SavedState({}, {})
            continue
        candidates = [(name, entries[name]) for name in param_names if name in entries and entries[name].options]
        if not candidates:
            missing.append(param_names[0] if param_names else f"one of shape {list(param.shape)} without a name")
            continue
        chosen[id(param)] = _one_of(candidates)
    if missing:
        raise ValueError(
            f"the state knows nothing of parameters that the optimizer holds: {missing}. Was it saved by an optimizer "
            "of the same parameters?"
        )
    foreign = [name for name in entries if name not in held_names]
    if foreign:
        raise ValueError(
            f"the state is of parameters that the optimizer does not hold: {foreign}. Give it those, or take their "
            "entries out."
        )
    return chosen


def _one_of(candidates: Sequence[tuple[str, _SavedState]]) -> _SavedState:
    """The entry of a parameter that was saved under several names: one that was stepped, as all that were agree."""
    stepped = [(name, entry) for name, entry in candidates if entry.state] or list(candidates)
    first, chosen = stepped[0]
    for name, entry in stepped[1:]:
        if not same_saved(chosen.state, entry.state) or not same_saved(chosen.options, entry.options):
            raise ValueError(
                f"{first!r} and {name!r} are one parameter, but the state has different values for them. Take the "
                "entries of one out."
            )
    return chosen


def same_saved(one: Any, other: Any) -> bool:
    """Whether two entries of an optimizer's state hold the same numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_saved(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return bool(one == other)


def _options(index: int, members: Iterable[tuple[str, _SavedState]]) -> dict[str, Any]:
    """The options of a group, on which all of its parameters must agree. None here: those it has."""
    first: tuple[str, _SavedState] | None = None
    for name, entry in members:
        first = first or (name, entry)
        for key in {**first[1].options, **entry.options}:
            first_option, option = first[1].options.get(key), entry.options.get(key)
            if not same_saved(first_option, option):
                raise ValueError(
                    f"group {index} of the optimizer has {first[0]!r} and {name!r}, which were saved with {key} "
                    f"{first_option} and {option}. Build the groups as they were when saved."
                )
    return {} if first is None else first[1].options
