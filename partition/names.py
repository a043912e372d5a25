"""The names of what a module of layers holds: behind the layer's number, or those that the layer brings.

    nn.Sequential(nn.Linear(4, 2), ...)     layer 0 holds "weight"                    it is "0.weight"
    to_sequential(model, sample)            layer 3 holds "model.layers.2.weight"     it is "model.layers.2.weight"

A part of a model brings the names of the model. Within `_modules` it has its number like any layer, so to torch's own
methods this is "3.model.layers.2.weight". `LayeredModule` takes the number away where names are told, and puts it in
front where a state_dict is loaded. Two parts may hold one module: it has one name, and two numbers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar, cast

from torch import Tensor, nn

from partition.errors import PartitionError
from partition.modes import Modes

T = TypeVar("T")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # names of attributes: tables, hooks, the mode


class ModelNames(NamedTuple):
    """The names of what a layer holds of a model.

    Attributes:
        names: those of the modules and tensors in it, none of which lies within another.
        places: of all modules and tensors of the model, by name, as from `places_of`.
        settings: of modules of the model that stay in it, by their names: as the layer runs them.
    """

    names: Sequence[str]
    places: Mapping[str, int]
    settings: Mapping[str, Mapping[str, Any]]


class NamedLayer(nn.Module, ABC):
    """A layer that may bring names."""

    @property
    @abstractmethod
    def in_model(self) -> ModelNames | None:
        """The names that it brings. None: its number names what it holds."""

    @property
    def begin(self) -> Callable[[], object]:
        """A function that begins a call, the same for all parts of a model: what is left may no longer be right."""
        return int  # nothing


class Names:
    """The names of what some layers hold.

    Args:
        layers: by number, as in `_modules`.
    """

    def __init__(self, layers: Mapping[str, nn.Module | None]) -> None:
        self._layers = layers
        self._in_model = {
            number: layer.in_model
            for number, layer in layers.items()
            if isinstance(layer, NamedLayer) and layer.in_model is not None
        }

    def __bool__(self) -> bool:
        """Whether a layer brings names."""
        return bool(self._in_model)

    @cached_property
    def units(self) -> dict[str, list[str]]:
        """The numbers of the layers that hold it, by each name that layers bring, and by the number of any other."""
        units: dict[str, list[str]] = defaultdict(list)
        for number in self._layers:
            for name in self._in_model[number].names if number in self._in_model else (number,):
                units[name].append(number)
        return dict(units)

    def of(self, numbered: str) -> str:
        """The name of what torch names behind the layer's number. A layer that brings names has that of the root."""
        number, _, name = numbered.partition(".")
        return name if number in self._in_model else numbered

    def holders(self, name: str) -> list[str]:
        """The numbers of the layers that hold something."""
        return next((self.units[start] for start in starts(name) if start in self.units), [])

    def bringing(self, name: str) -> list[str]:
        """The numbers of the layers that bring a name."""
        return [number for number in self.holders(name) if number in self._in_model]

    def numbered(self, table: Mapping[str, T]) -> dict[str, T]:
        """The entries of a table that stand under names that layers bring, under the numbers of these."""
        return {f"{number}.{name}": value for name, value in table.items() for number in self.bringing(name)}

    def in_order(self, names: Iterable[str]) -> list[str]:
        """In the order of the model; behind them what no model has, in the order of the layers."""
        return sorted(names, key=self.place)

    def without_numbers(self, texts: Iterable[str]) -> list[str]:
        """Texts in which torch names things, without the numbers of layers that bring names; each once."""
        patterns = [
            rf"{re.escape(number)}\.(?=(?:{'|'.join(map(re.escape, in_model.names))})\b)"
            for number, in_model in self._in_model.items()
            if in_model.names
        ]
        numbers = re.compile(rf"(?<![\w.])(?:{'|'.join(patterns)})")
        return list(dict.fromkeys(numbers.sub("", text) for text in texts))

    def place(self, name: str) -> tuple[int, int]:
        """The place of a name among others: see `in_order`. Within a module of a part all have that of the module."""
        unit = next((start for start in starts(name) if start in self.units), name)
        return (0, self._places[unit]) if unit in self._places else (1, self._index.get(unit, -1))

    def place_of_module(self, named: tuple[str, nn.Module]) -> tuple[tuple[int, int], ...]:
        """The place of a module, and of its first tensor: several parts may hold tensors of one module of the model."""
        name, module = named
        keys = (*module._parameters.keys(), *module._buffers.keys())
        return self.place(name), min([self.place(_dotted(name) + key) for key in keys], default=(0, 0))

    @cached_property
    def _places(self) -> Mapping[str, int]:
        """The places in the model, which all of its parts know."""
        return next((in_model.places for in_model in self._in_model.values()), {})

    @cached_property
    def _index(self) -> dict[str, int]:
        return {number: index for index, number in enumerate(self._layers)}


class LayeredModule(nn.Module):
    """A module whose children are layers: a Pipe, a stage. It names what they hold as they say."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As nn.Module's; what lies in a part of a model has its name in the model, and stands in its order.

        The part itself has its number; but the name of the root, as this module, where it has tensors of the root.
        """
        names, start = Names(self._modules), _dotted(prefix)
        if not names:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        by_name = [("", cast(nn.Module, self))]
        for name, module in islice(super().named_modules(set(), "", remove_duplicate=False), 1, None):
            is_root = bool(module._parameters or module._buffers)
            by_name.append((names.of(name) or ("" if is_root else name), module))
        seen = set() if memo is None else memo
        for name, module in sorted(by_name, key=names.place_of_module):
            if module not in seen:
                seen.update([module] if remove_duplicate else [])
                yield start + name if name else prefix, module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; those of a model by their names in it, and in its order.

        Raises:
            PartitionError: two have one name: the layers are parts of two models, or share what they did no longer.
        """
        return self._named(super().named_parameters, prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As nn.Module's; those of a model by their names in it, and in its order."""
        return self._named(super().named_buffers, prefix, recurse, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """As nn.Module's; by the names of a model too, but for its modules that contain blocks."""
        return self._get(nn.Module.get_submodule, target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """As nn.Module's; by the names of a model too."""
        return self._get(nn.Module.get_parameter, target)

    def get_buffer(self, target: str) -> Tensor:
        """As nn.Module's; by the names of a model too."""
        return self._get(nn.Module.get_buffer, target)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As nn.Module's; that of a model by its names, and in its order."""
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        names = Names(self._modules)
        if names:
            for table in (state, getattr(state, "_metadata", {})):
                _rename(table, names, args[1] if len(args) > 1 else prefix)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; that of a model by its names."""
        names, versions = Names(self._modules), getattr(state_dict, "_metadata", None)
        if not names:
            return super().load_state_dict(state_dict, strict, assign)
        if versions is not None:
            state_dict = OrderedDict(state_dict)
            setattr(state_dict, "_metadata", {**versions, **names.numbered(versions)})
        faults: list[list[str]] = []  # missing keys, unexpected ones, all others in words

        def shorten(*args: Any) -> None:
            for texts in faults:
                texts[:] = names.in_order(names.without_numbers(texts))

        with ExitStack() as stack:
            pre_hook = self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]  # of torch
                lambda *args: faults.extend(args[-3:])
            )
            stack.callback(pre_hook.remove)
            post_hook = self.register_load_state_dict_post_hook(shorten)  # type: ignore[no-untyped-call]  # of torch
            stack.callback(post_hook.remove)
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        names = Names(self._modules)
        if names:
            state = {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}
            entries = {name: value for name, value in state.items() if names.bringing(name)}
            for name in entries:
                del state_dict[prefix + name]
            if local_metadata.get("assign_to_params_buffers", False):
                entries = {name: self._to_be_shared(name, value, names) for name, value in entries.items()}
            state_dict.update({prefix + key: value for key, value in names.numbered(entries).items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _to_be_shared(self, name: str, value: Any, names: Names) -> Any:
        """A value that is assigned to the layers that bring its name: a parameter that several have stays one."""
        table: Mapping[str, Any] = self._modules
        layers = [table[number] for number in names.bringing(name)]
        if len(layers) == 1 or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        is_parameter = any(name in dict(layer.named_parameters(remove_duplicate=False)) for layer in layers)
        return nn.Parameter(value, requires_grad=False) if is_parameter else value  # torch then sets requires_grad

    def _named(
        self, iterate: Callable[..., Iterator[tuple[str, T]]], prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, T]]:
        names, start = Names(self._modules), _dotted(prefix)
        if not names:
            yield from iterate(prefix, recurse, remove_duplicate)
            return
        by_name: dict[str, T] = {}
        for name, tensor in iterate(prefix, recurse, remove_duplicate=False):
            if by_name.setdefault(name.removeprefix(start), tensor) is not tensor and isinstance(tensor, nn.Parameter):
                raise PartitionError(
                    f"two parameters are named {name!r}. Either the layers are parts of two models: cut one model that "
                    "calls both. Or two parts of one model shared the parameter and no longer do, as after "
                    "layers.to('meta'): cut the model anew."
                )
        seen: set[int] = set()
        for name in names.in_order(by_name):
            if not (remove_duplicate and id(by_name[name]) in seen):
                seen.add(id(by_name[name]))
                yield start + name, by_name[name]

    def _get(self, get: Callable[[nn.Module, str], T], target: str) -> T:
        layers: Mapping[str, Any] = self._modules
        names = Names(layers)
        holders = [layers[number] for number in names.bringing(target)] if names else []
        for layer in holders[:-1]:
            with suppress(AttributeError):  # it is on another rank
                return get(_by_tables(layer, target), target)
        number, _, rest = target.partition(".")
        if not holders and rest and isinstance(layers.get(number), NamedLayer):
            holders, target = [layers[number]], rest
        return get(_by_tables(holders[-1] if holders else self, target), target)


def _by_tables(layer: nn.Module, target: str) -> nn.Module:
    """A module that has what a layer or a Pipe holds and no attributes beside it, where what is looked for is there.

    A name in the model may be that of an attribute of the layer, one in an nn.Sequential that of one of Pipe.
    """
    tables = {table: vars(layer)[table] for table in ("_modules", "_parameters", "_buffers")}
    if not any(target.partition(".")[0] in names for names in tables.values()):
        return layer
    module = nn.Module()
    vars(module).update(tables)
    return module


class ModelLayers(LayeredModule, nn.Sequential):
    """An nn.Sequential of the parts of a model.

    Args:
        layers: the parts.
        modes: theirs and the model's.
    """

    def __init__(self, *layers: Any, modes: Modes | None = None) -> None:
        super().__init__(*layers)
        self.modes = modes or Modes()

    def train(self, mode: bool = True) -> Self:
        """As nn.Module's, and as the model's own; the model is told."""
        self.modes.tell(self, mode)
        self.training = mode
        self.modes.lead(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy, which is of no model, begins as the model is now."""
        self.modes.follow()
        begin_call(self.children())
        return vars(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Sequential's; in the modes that the model was told."""
        self.modes.follow()
        begin_call(self.children())
        return super().__call__(*args, **kwargs)


def begin_call(layers: Iterable[nn.Module]) -> None:
    """Begin a call of layers, those that bring names too."""
    for begin in {layer.begin for layer in layers if isinstance(layer, NamedLayer)}:
        begin()


def sequential(layers: Mapping[str, nn.Module | None], modes: Modes | None = None) -> nn.Sequential:
    """An nn.Sequential of some layers under their numbers, which names what they hold as they say.

    Args:
        layers: by number.
        modes: of the model of which they are parts. None: that is not known.

    Example:
        >>> list(sequential({"4": nn.Linear(2, 2)}).state_dict())
        ['4.weight', '4.bias']
    """
    container = ModelLayers(modes=modes) if Names(layers) else nn.Sequential()
    table: dict[str, Any] = container._modules  # a Sequential that holds None could not run
    table.update({number: layer for number, layer in layers.items() if layer is not None})
    return container


def plain_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are numbers or words, but for its mode.

    Example:
        >>> plain_of(nn.Dropout(0.5))
        {'p': 0.5, 'inplace': False}
    """
    items = vars(module).items()
    return {key: value for key, value in items if isinstance(value, bool | int | float | str) and key != "training"}


def behaviour_of(module: nn.Module) -> dict[str, Any]:
    """The behaviour of a module that its class does not say: the id of a forward of its own, hooks on its gradients.

    Example:
        >>> behaviour_of(nn.Dropout(0.5))
        {'forward': None, 'backward hooks': '()'}
    """
    forward = vars(module).get("forward")
    return {"forward": forward and id(forward), "backward hooks": str(tuple(module._backward_hooks))}


def places_of(model: nn.Module) -> dict[str, int]:
    """The places of all modules and tensors of a model, by name, in the order in which torch goes through them.

    Example:
        >>> places_of(nn.Linear(2, 2))
        {'': 0, 'weight': 1, 'bias': 2}
    """
    order: dict[str, int] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in [prefix, *[_dotted(prefix) + key for key in [*module._parameters.keys(), *module._buffers.keys()]]]:
            order.setdefault(name, len(order))
    return order


def first_names_of(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter of a module its first one, in order.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> first_names_of(nn.Sequential(layer, nn.Tanh(), layer))
        {'0.weight': '0.weight', '0.bias': '0.bias', '2.weight': '0.weight', '2.bias': '0.bias'}
    """
    firsts = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: firsts[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}


def starts(name: str) -> Iterator[str]:
    """A name, and those of the modules around it.

    Example:
        >>> list(starts("norm.weight"))
        ['norm.weight', 'norm', '']
    """
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def _rename(table: MutableMapping[str, Any], names: Names, prefix: str) -> None:
    """Take the numbers of layers that bring names out of the keys of a state."""
    numbered = {key.removeprefix(prefix): table.pop(key) for key in list(table) if key.startswith(prefix)}
    state = {names.of(name): value for name, value in numbered.items() if names.of(name) or not name}
    table.update({prefix + name: state[name] for name in names.in_order(state)})


def _dotted(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
