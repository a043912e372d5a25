"""Initialisation of layers that were built on the meta device, without any process holding the whole model.

    with torch.device("meta"):                 names, shapes and types; no memory
        model = nn.Sequential(...)
                    |
    own layers --meta_tensors_of--> tensors without memory --give memory--> the same objects, on their device
                                                                      |
    materialize= callable:  layer by layer, the default generators at layer_seed(seed, 0, index)
                 state_dict, or the path of a checkpoint (`Saved`): by the plain module's names
                 (callable, state): the callable first, then the state over it

Initial values belong to (seed, layer), so they do not depend on how many ranks there are. Objects stay the same, so
other references to them (another place, a list, an optimizer) stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike, fspath
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from partition.generators import Generator, generators_at, states_of
from pipeline.common.arguments import few, shown
from pipeline.common.module_tables import children_first
from pipeline.entry.state.meta_tensors import (
    MetaTensor,
    PlacedLayer,
    check_reachable,
    give_memory,
    is_marked,
    meta_tensors_of,
)
from pipeline.entry.state.saved import Saved
from pipeline.recompute.randomness import default_generators, layer_seed

Init: TypeAlias = Callable[[nn.Module], object]
State: TypeAlias = Mapping[str, Any] | str | PathLike[str]
ValueSource: TypeAlias = Init | State | tuple[Init, State] | None

_REMEDY = (
    "Give materialize=: a callable that fills a layer in place (pipeline.reset_parameters does, for layers "
    "of torch.nn), a state_dict, the path of a torch.distributed.checkpoint directory or of a folder of safetensors "
    "files, or (callable, state)."
)


def materialize(
    layers: Sequence[PlacedLayer],
    source: ValueSource,
    seed: int,
    others: Iterable[PlacedLayer] = (),
    anywhere: Callable[[bool], bool] = bool,
) -> None:
    """Give memory and values to all parameters and buffers of some layers that are on the meta device.

    What is not on the meta device is untouched. A tensor that stands at several places is filled at its first: by the
    callable's call for that layer, or from the state under any of its names. Every generator is left as it was found.

    Args:
        layers: this process's own.
        source: where values come from. A callable gets each layer that needs values, once, and fills it in place,
            without gradients; the default generators of torch, Python and numpy are at `layer_seed(seed, 0, index)`
            then. A mapping has the plain module's names, and only those that are needed are read. A path is that of a
            folder of safetensors files, or of a torch.distributed.checkpoint directory, where the names stand as they
            are or under "model".
            (callable, state): the callable fills, and the state replaces all but buffers that no state_dict has.
        seed: of the initial values.
        others: the model's other layers. A tensor that these have too may stand under their names in the state.
        anywhere: whether a condition holds in any process.

    Raises:
        ValueError: values that are missing, or of another shape or type; tensors without memory that are no parameters
            or buffers, or are no plain tensors. The message names them. Or there is a state, and nothing to fill.
        TypeError: `source` is none of these.
        RuntimeError: the callable put other objects in the place of those that it should fill.

    Example:
        >>> layer = nn.Linear(2, 3, device="meta")
        >>> materialize([PlacedLayer(0, "0", layer, torch.device("cpu"))], reset_parameters, seed=7)
        >>> _ = torch.manual_seed(layer_seed(7, 0, 0))
        >>> torch.equal(layer.weight, nn.Linear(2, 3).weight)
        True
    """
    init, state = _sources(source)
    empty = meta_tensors_of(layers)
    check_reachable(layers, empty)
    _add_names(empty, others)
    is_read = anywhere(bool(empty))
    if not is_read:
        _refuse_unread_state(state, layers)
    by_own_rules = [layer for layer in layers if _loads_by_own_rules(layer, empty)]
    if not is_read or not empty and not by_own_rules:
        return
    saved = None if state is None else _open(state, empty.values())
    _check_given(empty.values(), init is not None, saved, [name for layer in by_own_rules for name in _extra_in(layer)])
    give_memory(empty.values(), marked=init is not None)
    if init is not None:
        generators = default_generators([layer.device for layer in layers])
        with torch.no_grad(), generators_at(states_of(generators)):
            for layer in dict.fromkeys([meta.layer for meta in empty.values()]):
                _initialise(init, layer, empty, generators, seed)
    if saved is not None:
        with torch.no_grad():
            for meta in empty.values():
                _fill(meta, saved)
        _load_by_own_rules(by_own_rules, empty, saved)
    _check_filled([meta for meta in empty.values() if saved is None or not _names_in(saved, meta)])
    for layer in layers:
        for module in layer.module.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # as when it is moved: into one memory, for cuDNN


def reset_parameters(layer: nn.Module) -> None:
    """Initialise a layer anew, in place, as its class does: call `reset_parameters()` of all of its modules.

    Children come before their parents, as when they are built: under one seed, layers of torch.nn get the values of new
    ones (nn.AdaptiveLogSoftmaxWithLoss others: its method draws its children's once more). A method named
    `_reset_parameters` counts too, as in nn.MultiheadAttention.

    Raises:
        TypeError: the layer is no module.
        ValueError: some modules have parameters of their own but no such method; all are named. Nothing was done.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> layer[1].running_mean += 5
        >>> reset_parameters(layer)
        >>> layer[1].running_mean
        tensor([0., 0.])
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"the layer is {shown(layer)}. Give the module that is to be initialised.")
    modules = list(children_first(layer))
    unresettable = [
        f"{name or 'the layer'} ({type(module).__name__})"
        for name, module in modules
        if _reset_of(module) is None and next(module.parameters(recurse=False), None) is not None
    ]
    if unresettable:
        raise ValueError(
            f"modules with parameters but no reset_parameters(): {', '.join(unresettable)}. Give them that method, or "
            "initialise the layer with a callable of your own."
        )
    for _, module in modules:
        reset = _reset_of(module)
        if reset is not None:
            reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _sources(source: ValueSource) -> tuple[Init | None, State | None]:
    init, state = source if isinstance(source, tuple) and len(source) == 2 else (None, source)
    if not isinstance(source, tuple) and callable(source):
        init, state = source, None
    is_valid = state is None or isinstance(state, Mapping | str | PathLike)
    is_valid = is_valid and not isinstance(source, type | nn.Module)
    if not is_valid or isinstance(source, tuple) and not (callable(init) and state is not None):
        raise TypeError(f"materialize is {shown(source)}. {_REMEDY}")
    return init, state  # type: ignore[return-value]  # checked, in a way that mypy cannot follow


def _add_names(empty: Mapping[int, MetaTensor], others: Iterable[PlacedLayer]) -> None:
    """Note the names that tensors have in other layers: a file has a tied tensor under one of its names."""
    for layer in others:
        for place, tensor, _ in layer.places():
            if id(tensor) in empty:
                empty[id(tensor)].names.append(place)


def _refuse_unread_state(state: State | None, layers: Iterable[PlacedLayer]) -> None:
    """Refuse a state that is read by no rank, since all is initialised already."""
    if state is not None and any(True for layer in layers for _ in layer.places()):
        raise ValueError(
            f"materialize= has a state ({shown(state)}), and all of the module has values already, which stay. Build "
            "it on the meta device (with torch.device('meta'): ...), or call pipe.load_state_dict(state), where "
            "pipeline.Saved(path) is that of a path."
        )


def _check_given(
    empty: Iterable[MetaTensor], init: bool, saved: Mapping[str, Any] | None, extra: Iterable[str]
) -> None:
    """Refuse, by name, tensors and extra states that would get no value."""
    if saved is None:
        names = [meta.names[0] for meta in empty]
        if names and not init:
            raise ValueError(f"on the meta device, so without values: {few(names)}. {_REMEDY}")
        return
    lacking = [meta for meta in empty if not _names_in(saved, meta)]
    unsaved = [meta.names[0] for meta in lacking if not meta.saved]
    if unsaved and not init:
        raise ValueError(
            f"buffers on the meta device that no state_dict has (persistent=False): {few(unsaved)}. Give "
            "materialize=(callable, state), where the callable fills them, or a callable alone."
        )
    missing = [meta.names[0] for meta in lacking if meta.saved]
    missing += [] if init else [name for name in extra if name not in saved]
    if missing:
        raise ValueError(
            f"the state in materialize= has no values for {few(missing)}. It has {len(saved)} entries "
            f"({few(saved)}), which should have the plain module's names{_like(missing[0], saved)}. What a loader "
            "renames or converts, as from_pretrained does, save once it is loaded: "
            "save_pretrained(folder, save_original_format=False)."
        )


def _like(name: str, saved: Iterable[str]) -> str:
    """A name of the state with other steps in front, as that of a model within the model has."""
    for key in saved:
        if f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}"):
            return f": {key!r} may be {name!r}"
    return ""


def _names_in(saved: Mapping[str, Any], meta: MetaTensor) -> list[str]:
    """The names under which a state has the value of a tensor."""
    return [name for name in meta.names if name in saved]


def _open(state: State, empty: Iterable[MetaTensor]) -> Mapping[str, Any]:
    """The state by the plain module's names; those of a directory may stand under "model"."""
    if isinstance(state, Mapping):
        return state
    whole = Saved(fspath(state))
    plain = any(_names_in(whole, meta) for meta in empty)
    return whole if plain or "model" not in whole else Saved(fspath(state), "model")


def _initialise(
    init: Init,
    layer: PlacedLayer,
    empty: Mapping[int, MetaTensor],
    generators: Iterable[Generator],
    seed: int,
) -> None:
    """Let the callable fill a layer; tensors that were filled before keep their values."""
    before = {place: tensor for place, tensor, _ in layer.places()}
    others = [tensor for tensor in before.values() if id(tensor) not in empty or empty[id(tensor)].layer is not layer]
    copies = [(tensor, tensor.clone()) for tensor in others]
    for generator in generators:
        generator.manual_seed(layer_seed(seed, 0, layer.number))
    with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
        init(layer.module)
    after = {place: tensor for place, tensor, _ in layer.places()}
    changed = [place for place in {**before, **after} if before.get(place) is not after.get(place)]
    if changed:
        raise RuntimeError(
            f"the callable in materialize= put other objects at {changed}. It should fill the tensors that are there, "
            "as torch.nn.init does."
        )
    for tensor, value in copies:
        tensor.copy_(value)


def _fill(empty: MetaTensor, saved: Mapping[str, Any]) -> None:
    """Give a tensor its value, which may stand under any of its names, if it is the same under all."""
    first: Tensor | None = None
    for name in _names_in(saved, empty):
        value = saved[name]
        _check_fits(name, empty.tensor, value)
        if first is None:
            empty.tensor.copy_(value)
            first = value
        elif value is not first and not torch.equal(value, first):
            raise ValueError(
                f"{' and '.join(map(repr, empty.names))} are one tensor, but the state in materialize= has "
                "different values for them. Give them one value, or let the module have two parameters."
            )


def _check_fits(name: str, tensor: Tensor, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"the state in materialize= has a {type(value).__name__} for {name!r}, which is a tensor.")
    if value.is_meta or value.layout is not torch.strided:
        raise ValueError(
            f"the state in materialize= has a tensor on {value.device} of {value.layout} for {name!r}. Give one with "
            "all of its values."
        )
    if value.shape != tensor.shape or not _holds(tensor.dtype, value.dtype):
        raise ValueError(
            f"the state in materialize= has {value.dtype} of shape {list(value.shape)} for {name!r}, which is "
            f"{tensor.dtype} of shape {list(tensor.shape)}. Build the module with that shape and type, "
            f"from_config(config, dtype={value.dtype}) say."
        )


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every number of another type is one of this type.

    Example:
        >>> _holds(torch.float32, torch.bfloat16), _holds(torch.float16, torch.bfloat16)
        (True, False)
    """
    if dtype == other or not (dtype.is_floating_point and other.is_floating_point):
        return dtype == other
    wide, narrow = torch.finfo(dtype), torch.finfo(other)
    return wide.max >= narrow.max and wide.eps <= narrow.eps and wide.smallest_normal <= narrow.smallest_normal


def _loads_by_own_rules(layer: PlacedLayer, empty: Mapping[int, MetaTensor]) -> bool:
    """Whether a layer has rules of its own for loading, or extra state, and no values yet."""
    is_empty = [id(tensor) in empty for _, tensor, is_saved in layer.places() if is_saved]
    return (any(is_empty) or not is_empty) and any(map(_has_rules, layer.module.modules()))


def _load_by_own_rules(
    layers: Iterable[PlacedLayer], empty: Mapping[int, MetaTensor], saved: Mapping[str, Any]
) -> None:
    """Let layers with rules of their own for loading, or with extra state, load what was read for them."""
    for layer in layers:
        own = {place: empty[id(tensor)] for place, tensor, _ in layer.places() if id(tensor) in empty}
        state = {place: saved[names[0]] for place, meta in own.items() if (names := _names_in(saved, meta))}
        extra = {key: saved[key] for key in _extra_in(layer) if key in saved}
        layer.alone.load_state_dict({**state, **extra}, strict=False)


def _extra_in(layer: PlacedLayer) -> list[str]:
    """The names of the extra states of a layer."""
    named = layer.alone.named_modules()
    overriding = [name for name, module in named if type(module).set_extra_state is not nn.Module.set_extra_state]
    return [f"{name}._extra_state".removeprefix(".") for name in overriding]


def _has_rules(module: nn.Module) -> bool:
    """Whether a module has more to load than tensors, or loads these as others do not."""
    overridable = ("_load_from_state_dict", "set_extra_state")
    is_own = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in overridable)
    return is_own or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


def _check_filled(empty: Iterable[MetaTensor]) -> None:
    """Refuse, by name, tensors that the callable left without values."""
    unfilled = [meta.names[0] for meta in empty if is_marked(meta)]
    if unfilled:
        raise ValueError(
            f"the callable in materialize= left {unfilled} without values, or with some nan. Where a module is "
            "parametrized, fill the original (parametrizations.weight.original) or assign: module.weight = value."
        )
