"""The state of an optimizer of the whole model, as the plain module's own optimizer has it; and back, by names.

    each rank   its groups: options, {"0.weight": entries, ...}  --gathered-->  one torch.optim state_dict, on rank 0
    that dict, parameters by number  -->  "state.<name>.exp_avg", ...    which any number of ranks load

Numbers follow the groups, and within each the order of the model, as in an optimizer of the plain module's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipeline.entry.state.optimizer_state import (
    check_numbers,
    check_saveable,
    entries_of,
    flattened,
    options_of,
    same_saved,
)


def own_groups(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, all_names: Iterable[str]
) -> list[Any]:
    """The groups of this process's optimizer, each as a pair: its options, and by name what is kept of its parameters.

    Args:
        named_parameters: this process's, each once, in the order of the model. Nothing is kept of those named "".
        optimizer: of some or all of them.
        all_names: of the model's parameters, in order.

    Raises:
        ValueError: a parameter without a name; or groups that have theirs in another order, which numbers depend on.
    """
    check_saveable(optimizer)
    packed = optimizer.state_dict()
    check_numbers(packed)
    groups = []
    names_by_group = names_of_groups(named_parameters, optimizer, all_names)
    for group, names in zip(packed["param_groups"], names_by_group, strict=True):
        kept = {name: packed["state"].get(number, {}) for number, name in zip(group["params"], names, strict=True)}
        groups.append((options_of(group), {name: state for name, state in kept.items() if name}))
    return groups


def names_of_groups(
    named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, all_names: Iterable[str]
) -> list[list[str]]:
    """The names of the parameters of each group, which stand in the order of the model, or of this process's layers.

    The two differ where a tied parameter's first layer is not here.

    Raises:
        ValueError: a parameter without a name, or another order: numbers would be of others than the plain module's.
    """
    by_id = {id(param): name for name, param in named_parameters}
    orders = [list(by_id.values()), list(all_names)]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        names = [by_id[id(param)] for param in group["params"] if id(param) in by_id]
        if len(names) < len(group["params"]):
            raise ValueError(
                "the optimizer has a parameter that is none of the Pipe's. Make the optimizer of "
                "pipe.parameters(), and another one for other parameters."
            )
        own_names = [name for name in names if name]
        if not any(_is_in_order(own_names, order) for order in orders):
            raise ValueError(
                f"group {index} of the optimizer has its parameters in another order than the Pipe: "
                f"{own_names[:5]}. By numbers they would be taken for others: build the "
                "groups in the order of pipe.named_parameters(), or, in one process, save and load by "
                "optimizer.state_dict() and optimizer.load_state_dict."
            )
        groups.append(names)
    return groups


def _is_in_order(names: Sequence[str], order: Sequence[str]) -> bool:
    """Whether names stand as in an order, which may lack some that are new."""
    places = {name: place for place, name in enumerate(order)}
    found = [places.get(name, -1) for name in names]
    return found == sorted(found)


def whole_state(groups_of_ranks: Mapping[str, Sequence[Any]], names: Iterable[str]) -> dict[str, Any]:
    """A torch.optim state_dict, on the CPU, of what all processes have.

    Args:
        groups_of_ranks: by rank, as from `own_groups`.
        names: of the model's parameters, each once, in order.

    Raises:
        ValueError: the ranks' optimizers have other groups, or other options.
    """
    home: dict[str, int] = {}  # the group of each parameter
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    options: dict[int, dict[str, Any]] = {}
    kept: dict[int, dict[str, Any]] = {}
    rows = [(rank, *row) for rank, groups in groups_of_ranks.items() for row in enumerate(groups)]
    for rank, index, (rank_options, rank_kept) in sorted(rows, key=lambda row: not row[2][1]):
        if index in options and not rank_kept:
            continue  # no options are loaded where a group has no parameters, so those there say nothing
        first = options.setdefault(index, rank_options)
        keys = {**first, **rank_options}
        differing = [key for key in keys if not same_saved(first.get(key), rank_options.get(key))]
        if differing:
            raise ValueError(
                f"group {index} of the optimizer has another {', '.join(differing)} on rank {rank}. Build the "
                "groups alike on all ranks, with params=[] where a rank has none of a group's, and change their "
                "options alike. (pipe.optimizer_state_dict, each rank's part by name, needs no groups that are alike.)"
            )
        moved = [name for name in rank_kept if home.setdefault(name, index) != index]
        if moved:
            raise ValueError(
                f"the tied parameter '{moved[0]}' is in group {index} of the optimizer on rank {rank}, and in "
                f"group {home[moved[0]]} on another. Build the groups alike on all ranks."
            )
        kept.setdefault(index, {}).update(rank_kept)
    places = {name: place for place, name in enumerate(names)}
    numbers = count()
    for index, states in sorted(kept.items()):
        members = sorted(states, key=places.__getitem__)
        params = [next(numbers) for _ in members]
        packed["param_groups"].append({**options[index], "param_names": members, "params": params})
        packed["state"].update({
            number: states[name] for number, name in zip(params, members, strict=True) if states[name]
        })  # fmt: skip
    copied: dict[str, Any] = copied_to_host(packed)
    return copied


def copied_to_host(state: Any) -> Any:
    """A state with copies of its tensors, on the CPU: what others sent is of this moment, and so is the rest."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def is_packed(state: Mapping[str, Any]) -> bool:
    """Whether this is a torch.optim state_dict, whose parameters have numbers."""
    return {"state", "param_groups"} <= state.keys() and isinstance(state["param_groups"], Sequence)


def whole_by_name(packed: Mapping[str, Any], first_names: Mapping[str, str]) -> dict[str, Any]:
    """A torch.optim state_dict by names, as `optimizer_state.optimizer_state` makes it of the whole model.

    Args:
        packed: from `whole_state`; or of an optimizer of all the plain module's parameters.
        first_names: for every name of a parameter of the model its first one, in order.

    Raises:
        ValueError: groups that do not say which parameters they have; state of no parameter.
    """
    check_numbers(packed)
    aliases: dict[str, list[str]] = {}
    for name, first in first_names.items():
        aliases.setdefault(first, []).append(name)
    groups = packed["param_groups"]
    is_all = len(groups) == 1 and len(groups[0]["params"]) == len(aliases)
    flat: dict[str, Any] = {}
    for index, group in enumerate(groups):
        names = group.get("param_names") or (list(aliases) if is_all else [])
        if len(names) != len(group["params"]):
            raise ValueError(
                f"group {index} of the state has {len(group['params'])} parameters by number, of the model's "
                f"{len(aliases)}. Which ones is known where it has 'param_names': save "
                "pipe.full_optimizer_state_dict(optimizer), or give the plain optimizer model.named_parameters()."
            )
        for number, first in zip(group["params"], names, strict=True):
            state = dict(flattened(first, packed["state"].get(number, {})))
            flat.update(entries_of(aliases.get(first_names.get(first, first), [first]), group, state, state))
    return flat
