"""The names of what a module of layers holds: behind the layer's number, or those that the layer brings.

    nn.Sequential(nn.Linear(4, 2), ...)     layer 0 holds "weight"                    it is "0.weight"
    to_sequential(model, sample)            layer 3 holds "model.layers.2.weight"     it is "model.layers.2.weight"

A part of a model brings the names of the model. It is a tree of holders, which stand for the modules of the model that
contain its blocks. Within `_modules` it has its number like any layer, so to torch's own methods this is
"3.model.layers.2.weight". `LayeredModule` lays the trees of its parts over one another, and torch's methods go through
that.

    Beginning  model ── embed                  model ─┬─ embed
    Block      model ── layers ── 0    -->            ├─ layers ─┬─ 0
    Block      model ── layers ── 1                   │          └─ 1
    End        model ── norm                          └─ norm

Several parts may hold a module, each a copy. The first is in that tree; what is loaded there the others get, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor, nn

from partition.errors import PartitionError
from partition.modes import Modes

T = TypeVar("T")
_TABLES = ("_parameters", "_buffers", "_modules")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # names of attributes: tables, hooks, the mode
STALE_MARK = "_stale_mark"  # the attribute of a module that another process trains


class ModelNames(NamedTuple):
    """The names of what a layer holds of a model.

    Attributes:
        names: those of the modules and tensors in it. What several parts call may lie within a module of one of them.
        places: of all modules and tensors of the model, by name, as from `places_by_name`.
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

    @property
    def buffers_beside(self) -> Iterable[Tensor]:
        """The buffers of the model that it computes with, and that are in no layer."""
        return ()


class Holder(nn.Module):
    """A module that gives the modules and tensors in it their names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name not in self._modules:
            raise PartitionError(
                f"module {name!r} is put into a part of a model that has no such module, and would not be called: "
                "another part has it, or none. Put it into the model, and cut that."
            )
        super().__setattr__(name, value)


class LayeredModule(nn.Module):
    """A module whose children are layers: a Pipe, a stage. It names what they hold as they say."""

    def __getattr__(self, name: str) -> Any:
        """As nn.Module's; of a name in a model the error says where that is."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in _places(vars(self).get("_modules", {}).values()):
                raise AttributeError(
                    f"{error}: the model that was cut has it, and this has the model's parts, by their numbers. Give "
                    "the model itself, whose parameters these are, to what looks names up as attributes (accelerate's "
                    "load_checkpoint_in_model does, torch's get_model_state_dict), or use state_dict, load_state_dict."
                ) from None
            raise

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As nn.Module's; what lies in a part of a model has its name in the model, and stands in its order.

        The part itself has its number; but the name of the root, as this module, where it has tensors of the root.
        """
        parts = self._parts()
        if not parts:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        places, seen = places_by_name(self._tree()), set() if memo is None else memo
        named: list[tuple[int, bool, str, nn.Module]] = []
        for path, module in super().named_modules(set(), "", remove_duplicate=False):
            number, _, name = path.partition(".")
            keys = (*module._parameters.keys(), *module._buffers.keys())
            if number not in parts or not name and not keys:
                name = path
            tensors = [places.get(_dotted(name) + key, len(places)) for key in keys]  # several parts may have some each
            place = min(tensors, default=places.get(name, len(places)))
            named.append((place, not isinstance(module, Holder), name, module))
        for *_, name, module in sorted(named, key=lambda entry: entry[:2]):
            if module not in seen:
                seen.update([module] if remove_duplicate else [])
                yield _dotted(prefix) + name if name else prefix, module

    def children(self) -> Iterator[nn.Module]:
        """The layers, as nn.Module's."""
        return (layer for _, layer in super().named_children())

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As nn.Module's; of a model the outermost modules that parts have whole, by their names in it, in its order.

        A module that several parts have pieces of stands there if it has tensors beside these: a holder of them.
        """
        return outermost(self._tree()) if self._parts() else super().named_children()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; those of a model by their names in it, and in its order.

        Raises:
            PartitionError: two have one name: the layers are parts of two models, or share what they did no longer.
        """
        if not self._parts():
            return super().named_parameters(prefix, recurse, remove_duplicate)
        tree = self._tree()
        by_name = dict(tree.named_parameters(prefix, remove_duplicate=False))
        for name, parameter in super().named_parameters(prefix, remove_duplicate=False):
            if by_name.get(name) is not parameter:
                raise PartitionError(
                    f"two parameters are named {name!r}. Either the layers are parts of two models: cut one model that "
                    "calls both. Or two parts of one model shared the parameter and no longer do, as after "
                    "layers.to('meta'): cut the model anew."
                )
        return tree.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As nn.Module's; those of a model by their names in it, and in its order."""
        return self._tree().named_buffers(prefix, recurse, remove_duplicate)

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
        with self._as_in_model(self._tree()) if self._parts() else nullcontext(self) as view:
            return nn.Module.state_dict(view, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; that of a model by its names."""
        if self._is_by_number(state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        tree, own, versions = self._tree(), OrderedDict(state_dict), deepcopy(getattr(state_dict, "_metadata", {}))
        setattr(own, "_metadata", versions)  # in which torch notes `assign`
        try:
            with self._as_in_model(tree) as view:
                return nn.Module.load_state_dict(view, own, strict, assign)
        finally:  # what is not in the tree: copies of what is, and holders
            own.update([pair for pair in tree.named_parameters(remove_duplicate=False) if pair[0] in own])  # stay one
            modules = dict(tree.named_modules(remove_duplicate=False))
            for name, module in [pair for part in self._parts().values() for pair in part.named_modules()]:
                if module is not modules.get(name):
                    metadata = {**versions.get(name, {}), "assign_to_params_buffers": assign}
                    module._load_from_state_dict(own, _dotted(name), metadata, False, [], [], [])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """As nn.Module's; a module around this one loads the layers next, which are given what they have then."""
        keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if not self._is_by_number(keys):
            own = {key: state_dict.pop(prefix + key) for key in keys}
            assign = local_metadata.get("assign_to_params_buffers", False)
            missing, unexpected = LayeredModule.load_state_dict(self, own, strict=False, assign=assign)
            args[1].extend([prefix + key for key in missing])
            args[2].extend([prefix + key for key in unexpected])
            state_dict.update(super().state_dict(prefix=prefix, keep_vars=True))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _is_by_number(self, keys: Iterable[str]) -> bool:
        """Whether keys of a state have numbers of layers: no layer brings names, or an nn.Sequential has saved it."""
        numbers, names = {key.partition(".")[0] for key in keys}, self._tree()._modules.keys()
        return not self._parts() or numbers <= self._modules.keys() and not numbers <= names

    def _parts(self) -> dict[str, Any]:
        """The parts of a model, by number."""
        holders = {number: layer for number, layer in self._modules.items() if isinstance(layer, Holder)}
        return {number: layer for number, layer in holders.items() if isinstance(layer, NamedLayer)}

    def _tree(self) -> nn.Module:
        """All that is in the layers by its names, in the order of the model; behind it what is in no part."""
        parts, others = self._parts(), Holder()
        layers = {number: layer for number, layer in self._modules.items() if number not in parts}
        vars(others).update(_parameters=self._parameters, _buffers=self._buffers, _modules=layers)
        tree: nn.Module = merged([*parts.values(), others], _places(parts.values()))
        return tree

    @contextmanager
    def _as_in_model(self, tree: nn.Module) -> Iterator[nn.Module]:
        """This module with the tables of a tree, to torch's methods; what they set is set here."""
        before = {**vars(self), **{table: vars(tree)[table] for table in _TABLES}}
        view = object.__new__(type(self))
        vars(view).update(before)
        try:
            yield view
        finally:
            set_here = {name: value for name, value in vars(view).items() if value is not before.get(name, before)}
            vars(self).update(set_here)

    def _get(self, get: Callable[[nn.Module, str], T], target: str) -> T:
        number, _, name = target.partition(".")
        for root, path in ((self._tree(), target), (merged([self._parts().get(number, Holder())], {}), name)):
            with suppress(AttributeError):
                found = get(root, path)
                if type(found) is not Holder:  # which is no module of the model
                    return found
        return get(self, target)


def merged(entries: Sequence[Any], places: Mapping[str, int], name: str = "") -> Any:
    """The first of several modules or tensors of one name that is no holder; else a holder of all that is in these.

    Args:
        entries: the modules or tensors.
        places: of what is in them, by name: its order.
        name: that they have.
    """
    for entry in entries:
        if not isinstance(entry, Holder):
            return entry
    module = Holder()
    for table in _TABLES:
        groups: dict[str, list[Any]] = defaultdict(list)
        for entry in entries:
            for key, inner in vars(entry)[table].items():
                groups[_dotted(name) + key].append(inner)
        for path in sorted(groups, key=lambda path: places.get(path, len(places))):
            vars(module)[table][path.rpartition(".")[2]] = merged(groups[path], places, path)
    return module


def outermost(tree: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules in a tree that are no holders, and a holder of the tensors of each that is one."""
    if type(tree) is not Holder:
        yield name, tree
        return
    if tree._parameters or tree._buffers:
        tensors = Holder()
        vars(tensors).update(_parameters=tree._parameters, _buffers=tree._buffers)
        yield name, tensors
    for key, module in tree.named_children():
        yield from outermost(module, _dotted(name) + key)


def units_of(layers: Mapping[str, nn.Module | None]) -> dict[str, list[str]]:
    """By each name that layers bring, and by the number of any other, the numbers of the layers that hold it.

    Example:
        >>> units_of({"0": nn.Linear(2, 2), "1": nn.Tanh()})
        {'0': ['0'], '1': ['1']}
    """
    units: dict[str, list[str]] = defaultdict(list)
    for number, layer in layers.items():
        in_model = layer.in_model if isinstance(layer, NamedLayer) else None
        for name in [number] if in_model is None else in_model.names:
            units[name].append(number)
    return dict(units)


def in_order(names: Iterable[str], layers: Mapping[str, nn.Module | None]) -> list[str]:
    """Names of what layers hold, in the order of the model; behind it what no model has, in the order of the layers.

    What has joined a module since it was cut stands behind what was in it.

    Example:
        >>> in_order(["1.weight", "0.weight", "0.bias"], {"0": nn.Linear(2, 2), "1": nn.LayerNorm(2)})
        ['0.weight', '0.bias', '1.weight']
    """
    return by_place(names, last_places(layers))


def last_places(layers: Mapping[str, nn.Module | None]) -> dict[str, int]:
    """The place of what stands last in each module that layers hold, by name: in the model, or among the layers."""
    places, last = _places(layers.values()), dict[str, int]()
    for place, unit in enumerate([*places, *(unit for unit in units_of(layers) if unit not in places)]):
        last.update(dict.fromkeys(starts(unit), place))
    return last


def by_place(names: Iterable[str], places: Mapping[str, int]) -> list[str]:
    """Names in the order of places: of a name that has none, that of the module around it."""
    return sorted(names, key=lambda name: next(places[start] for start in starts(name) if start in places))


def _places(layers: Iterable[nn.Module | None]) -> Mapping[str, int]:
    """The places in the model of what layers hold, which all that bring names know."""
    in_models = (layer.in_model for layer in layers if isinstance(layer, NamedLayer))
    return next((in_model.places for in_model in in_models if in_model is not None), {})


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
    container = ModelLayers(modes=modes) if _places(layers.values()) else nn.Sequential()
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
    """The behaviour of a module beside its settings: its class, the id of a forward of its own, gradients' hooks.

    Example:
        >>> behaviour_of(nn.Dropout(0.5))
        {'class': <class 'torch.nn.modules.dropout.Dropout'>, 'forward': None, 'backward hooks': '()'}
    """
    forward, hooks = vars(module).get("forward"), str(tuple(module._backward_hooks))
    return {"class": type(module), "forward": forward and id(forward), "backward hooks": hooks}


def places_by_name(model: nn.Module) -> dict[str, int]:
    """The places of all modules and tensors of a model, by name, in the order in which torch goes through them.

    Example:
        >>> places_by_name(nn.Linear(2, 2))
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


def _dotted(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
