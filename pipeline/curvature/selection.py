"""The model of a matrix, and the selection of its parameters that the matrix is over.

    Hessian(pipe, ...)                          all that require a gradient
    Hessian(pipe, ..., params="3")              those of layer 3; also a list of names, or a predicate(name, parameter)
    Hessian(module, ...)                        a Pipe of one stage around it, for the analysis
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from torch import nn

from partition.names import ModelLayers
from pipeline.common.arguments import few
from pipeline.entry.validation import check_hooks
from pipeline.pipe import Pipe

ParamSelection: TypeAlias = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | None


def as_pipe(model: nn.Module) -> tuple[Pipe, str]:
    """A Pipe of the same layers; and what its parameters' names begin with that the model's do not.

    Raises:
        TypeError: no module.
        ValueError: a plain module on several devices, or a Pipe with replicas or hooks.
    """
    if isinstance(model, Pipe):
        if model.runtime.has_replicas:
            raise ValueError(
                "the Pipe has replicas, which train on other mini-batches. Build one without replicas= on each group, "
                "and give all of the data to it."
            )
        check_hooks(model, "a product")
        return model, ""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}. Give a Pipe or a torch.nn.Module.")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the module is on several devices ({sorted(map(str, devices))}). Wrap it: Pipe(module, balance, devices="
            "[...])."
        )
    is_cut = isinstance(model, nn.Sequential) and type(model) in (nn.Sequential, ModelLayers) and len(model) > 0
    layers = model if isinstance(model, nn.Sequential) and is_cut else nn.Sequential(model)
    pipe = Pipe(layers, [len(layers)], devices=list(devices) or ["cpu"])
    return pipe, "" if is_cut else "0."


def chosen(
    parameters: Mapping[str, nn.Parameter], params: ParamSelection, first_names: Mapping[str, str]
) -> list[str]:
    """The names of the parameters that are wanted, of those here.

    Args:
        parameters: those here, by their first names.
        params: see above; a name is a parameter's, or the beginning of several up to a dot. A tied parameter is wanted
            if any of its names is.
        first_names: for each name of a parameter its first one, other processes' too.

    Raises:
        ValueError: a name stands for no parameter, or for none that requires a gradient.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if params is None:
        return list(trained)
    if callable(params):
        return [name for name, parameter in trained.items() if params(name, parameter)]
    wanted: set[str] = set()
    for selector in [params] if isinstance(params, str) else params:
        matches = {first for name, first in first_names.items() if f"{name}.".startswith(f"{selector}.")}
        if not matches:
            names = list(dict.fromkeys(first_names.values()))
            raise ValueError(f"params has {selector!r}, which is no parameter or layer. There are {few(names)}.")
        local_matches = [name for name in parameters if name in matches]
        if local_matches and trained.keys().isdisjoint(local_matches):
            raise ValueError(
                f"params has {selector!r}, but {few(local_matches)} do not require a gradient. Call requires_grad_() "
                "first."
            )
        wanted |= matches
    return [name for name in trained if name in wanted]
