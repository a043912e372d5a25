"""The parameters of a store: their order, and the parameter that a key means.

    module | (name, parameter) pairs | dict | parameters   -->   slots, in that order, by id; names -> slots
    key: a parameter, or one of its names                  -->   its GradientSum

A tied parameter is one slot under all its names. An open table adds new parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from torch import Tensor, nn

from pipeline.common.arguments import shown
from pipeline.gradients.slot import GradientSum

GradKey: TypeAlias = Tensor | str
Params: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]]


_PARAMS = "Give a module, a dict or (name, parameter) pairs, or a list of parameters; nothing for an open store."


class Keys:
    """The slots of a store.

    Args:
        params: the parameters of the store; None: an open table.
        densify: as in GradientSum.
    """

    def __init__(self, params: Params | None, densify: bool) -> None:
        self.is_open = params is None
        self.slots: dict[int, GradientSum] = {}  # by the parameter's id: equal parameters are different keys
        self.names: dict[str, GradientSum] = {}
        self._densify = densify
        for name, param in _named(params):
            slot = self._slot_of(param)
            if name is not None and self.names.setdefault(name, slot) is not slot:
                raise ValueError(f"two parameters are named {name!r}. Give each a name of its own.")

    def find(self, key: GradKey) -> GradientSum:
        """The slot of a key. Raises KeyError where there is none."""
        if isinstance(key, str):
            if key not in self.names:
                raise KeyError(f"the GradStore has no parameter named {key!r}.{_nearest(key, self.names)}")
            return self.names[key]
        if not isinstance(key, Tensor):
            raise TypeError(f"the key is {shown(key)}. Give a parameter, or its name.")
        if id(key) not in self.slots and not self.is_open:
            raise KeyError(
                f"the GradStore does not know this parameter of shape {list(key.shape)}. It holds "
                f"{len(self.slots)} parameters and is closed: GradStore() without arguments takes new ones."
            )
        return self._slot_of(key)

    def first_names(self) -> dict[int, str]:
        """The first name of each parameter that has one, by the parameter's id."""
        return {id(slot.param): name for name, slot in reversed(self.names.items())}

    def learn(self, other: Keys) -> None:
        """Adopt another table's names of parameters that this one has."""
        for name, slot in other.names.items():
            if id(slot.param) in self.slots:
                self.names.setdefault(name, self.slots[id(slot.param)])

    def filled(self) -> Iterator[tuple[GradientSum, Tensor]]:
        """The slots that have a gradient, with it."""
        return ((slot, grad) for slot in self.slots.values() if (grad := slot.sum) is not None)

    def clear(self) -> None:
        """Empty all slots."""
        for slot in self.slots.values():
            slot.put(None)

    def _slot_of(self, param: Tensor) -> GradientSum:
        slot = self.slots.get(id(param))
        return slot or self.slots.setdefault(id(param), GradientSum(param, self._densify))


def _named(params: Params | None) -> Iterator[tuple[str | None, Tensor]]:
    if params is None:
        return
    if isinstance(params, nn.Module):
        yield from params.named_parameters(remove_duplicate=False)
        return
    if isinstance(params, Tensor):  # an iterable too: of its rows
        raise TypeError("params is one tensor. Give a list: GradStore([parameter]).")
    if isinstance(params, str | bytes | type) or not isinstance(params, Iterable):
        raise TypeError(f"params is {shown(params)}. {_PARAMS}")
    for entry in params.items() if isinstance(params, Mapping) else params:
        if isinstance(entry, Tensor):
            yield None, entry
        elif isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], Tensor):
            yield _name_in(entry), entry[1]
        else:
            raise TypeError(f"params holds {shown(entry)}. {_PARAMS}")


def _name_in(pair: Sequence[Any]) -> str:
    if not isinstance(pair[0], str):
        raise TypeError(f"params has a parameter named {shown(pair[0])}. Names are strings.")
    return pair[0]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
