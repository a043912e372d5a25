"""The state of an optimizer of the whole model, as the plain module's own optimizer has it; and back, by names.

    each rank   {"0.weight": (group, entries), ...}  --gathered-->  one torch.optim state_dict, on rank 0
    that dict, parameters by number  -->  "state.<name>.exp_avg", ...    which any number of ranks load

Numbers follow the groups, and within each the order of the model, as in an optimizer of the plain module's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pipeline.entry.state.optimizer_state import check_numbers, check_optimizer, entries_of, flattened, options_of, same

_GROUP, _PARAMETER = "group.", "parameter."


def own_entries(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer, rank: int) -> dict[str, Any]:
    """The state of this process's optimizer: the options of its groups, and its entries for each parameter.

    Args:
        named_parameters: this process's, each once, in the order of the model. One named "" stands for none.
        optimizer: of some or all of them.
        rank: this process's number.

    Raises:
        ValueError: a parameter without a name; or groups that have theirs in another order, which numbers depend on.
    """
    check_optimizer(optimizer)
    packed = optimizer.state_dict()
    entries: dict[str, Any] = {}
    for index, names in enumerate(names_of_groups(named_parameters, optimizer)):
        group = packed["param_groups"][index]
        entries[f"{_GROUP}{index}.{rank}"] = options_of(group)
        for number, name in zip(group["params"], names, strict=True):
            if name:
                entries[_PARAMETER + name] = {"group": index, "kept": dict(packed["state"].get(number, {}))}
    check_numbers(packed)
    return entries


def names_of_groups(named_parameters: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each group, which stand in the order of the model.

    Raises:
        ValueError: a parameter without a name, or another order: numbers would be of others than the plain module's.
    """
    places = {id(param): (place, name) for place, (name, param) in enumerate(named_parameters)}
    names = []
    for index, group in enumerate(optimizer.param_groups):
        known_places = [places[id(param)] for param in group["params"] if id(param) in places]
        if len(known_places) < len(group["params"]):
            raise ValueError(
                "the optimizer has a parameter that is none of this rank's of the Pipe. Make the optimizer of "
                "pipe.parameters(), and another one for other parameters."
            )
        if known_places != sorted(known_places):
            raise ValueError(
                f"group {index} of the optimizer has its parameters in another order than the Pipe: "
                f"{[name for _, name in known_places][:5]}. By numbers they would be taken for others: build the "
                "groups in the order of pipe.named_parameters(), or, in one process, save and load by "
                "optimizer.state_dict() and optimizer.load_state_dict."
            )
        names.append([name for _, name in known_places])
    return names


def whole_state(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A torch.optim state_dict, on the CPU, of what all processes have.

    Args:
        entries: of all of them, as from `own_entries`.
        names: of the model's parameters, each once, in order.

    Raises:
        ValueError: the ranks' optimizers have other groups, or other options.
    """
    groups: dict[int, dict[str, Any]] = {}
    for key in (key for key in entries if key.startswith(_GROUP)):
        _, group, rank = key.split(".")
        index, rank_options = int(group), entries[key]
        options = groups.setdefault(index, rank_options)
        differing = [
            option
            for option in {**options, **rank_options}
            if not same(options.get(option), rank_options.get(option))
        ]
        if differing:
            raise ValueError(
                f"group {index} of the optimizer has another {', '.join(differing)} on rank {rank}. Build the groups "
                "alike on all ranks, and change their options alike."
            )
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    by_group: dict[int, list[str]] = {index: [] for index in sorted(groups)}
    for name in (name for name in names if _PARAMETER + name in entries):
        by_group[entries[_PARAMETER + name]["group"]].append(name)
    number = 0
    for index, members in by_group.items():
        numbers = range(number, number + len(members))
        packed["param_groups"].append({**groups[index], "param_names": members, "params": list(numbers)})
        states = {number: entries[_PARAMETER + name]["kept"] for number, name in zip(numbers, members, strict=True)}
        packed["state"].update({number: state for number, state in states.items() if state})
        number += len(members)
    copied: dict[str, Any] = copied_to_host(packed)
    return copied


def copied_to_host(state: Any) -> Any:
    """A state with copies of its tensors, on the CPU: what others sent is of this moment, and so is the rest."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def is_packed(state: Mapping[str, Any]) -> bool:
    """Whether this is a torch.optim state_dict, whose parameters have numbers."""
    return "param_groups" in state and isinstance(state["param_groups"], Sequence)


def by_name(packed: Mapping[str, Any], first_names: Mapping[str, str]) -> dict[str, Any]:
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
