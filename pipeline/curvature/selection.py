"""The selection of parameters that a matrix is over.

    Hessian(pipe, ...)                          all that require a gradient
    Hessian(pipe, ..., params="3")              those of layer 3; also a list of names, or a predicate(name, parameter)
    Hessian(module, ...)                        a Pipe of one stage around it, for the analysis
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from partition.names import ModelLayers
from pipeline.common.arguments import few
from pipeline.common.call_lock import turn
from pipeline.curvature.products.sharded import ParameterSpace, SpaceParameter
from pipeline.curvature.space import HOST
from pipeline.distributed.agreement import MismatchError, digest, values_in_words
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
    named_parameters: Sequence[tuple[str, nn.Parameter]], params: ParamSelection, first_names: Mapping[str, str]
) -> list[str]:
    """The names of the parameters that are wanted, of those here.

    Args:
        named_parameters: the parameters here, by their first names.
        params: see above; a name is a parameter's, or the beginning of several up to a dot. A tied parameter is wanted
            if any of its names is.
        first_names: for each name of a parameter its first one, other processes' too.

    Raises:
        ValueError: a name stands for no parameter, or for none that requires a gradient.
    """
    trained = {name for name, parameter in named_parameters if parameter.requires_grad}
    if params is None:
        return [name for name, _ in named_parameters if name in trained]
    if callable(params):
        is_wanted = params
        return [name for name, parameter in named_parameters if name in trained and is_wanted(name, parameter)]
    wanted: set[str] = set()
    for selector in [params] if isinstance(params, str) else params:
        matches = {first for name, first in first_names.items() if _stands_for(selector, name)}
        if not matches:
            names = list(dict.fromkeys(first_names.values()))
            raise ValueError(f"params has {selector!r}, which is no parameter or layer. There are {few(names)}.")
        local_matches = [name for name, _ in named_parameters if name in matches]
        if local_matches and trained.isdisjoint(local_matches):
            raise ValueError(
                f"params has {selector!r}, but {few(local_matches)} do not require a gradient. Call requires_grad_() "
                "first."
            )
        wanted |= matches
    return [name for name, _ in named_parameters if name in trained and name in wanted]


def _stands_for(wanted: str, name: str) -> bool:
    return name == wanted or name.startswith(wanted + ".")


def space_of(pipe: Pipe, prefix: str, params: ParamSelection) -> ParameterSpace:
    """The vectors of a Pipe's parameters; on several ranks all make it together.

    Raises:
        ValueError: nothing is left, or a parameter is complex.
        MismatchError: the ranks were given different params.
    """
    runtime = pipe.runtime
    if params is not None and not isinstance(params, str) and not callable(params):
        params = list(params)
    with turn(), runtime.communicator("curvature") as communicator:  # what is refused on one rank is refused on all
        communicator.open(lambda values: {"params": _in_words(params)}, draws=False)
        parameters, is_double = _space_parameters(pipe, prefix, params)
        is_double = bool(communicator.exchange.sum_over(torch.tensor([float(is_double)], **HOST)).item())
    is_cut = runtime.topology is not None
    sum_over: Callable[[Tensor], Tensor] = partial(_sum_over_ranks, pipe) if is_cut else lambda numbers: numbers
    collective: Callable[[], AbstractContextManager[object]] = partial(_collective, pipe) if is_cut else nullcontext
    dtype = torch.float64 if is_double else torch.float32
    check_ties = partial(_check_ties, pipe, sum_over)
    space = ParameterSpace(parameters, dtype, runtime.rank, runtime.ranks, sum_over, check_ties, collective)
    if space.size == 0:
        raise ValueError(
            f"there is no parameter to differentiate by (params={params!r}): none is chosen, or all are frozen. "
            "Call requires_grad_(), or choose others."
        )
    return space


def _in_words(params: ParamSelection) -> str:
    return getattr(params, "__qualname__", "a function") if callable(params) else repr(params)


def _space_parameters(pipe: Pipe, prefix: str, params: ParamSelection) -> tuple[list[SpaceParameter], bool]:
    """This process's parameters of the space, and whether there is a float64 one."""
    named_parameters = [(name.removeprefix(prefix), parameter) for name, parameter in pipe.named_parameters()]
    first_names = _first_names(pipe, prefix)
    names = set(chosen(named_parameters, params, first_names))
    counted_elsewhere = _counted_elsewhere(pipe)
    parameters, is_double = [], False
    for name, parameter in named_parameters:
        if name not in names:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"'{name}' is {parameter.dtype}. Curvature is that of a function of real numbers: keep its real and "
                "imaginary parts as two parameters (torch.view_as_complex), or leave it out with params=."
            )
        is_double = is_double or parameter.dtype == torch.float64
        counts = id(parameter) not in counted_elsewhere
        parameters.append(SpaceParameter(name, parameter.shape, parameter.device, counts))
    return parameters, is_double


def _first_names(pipe: Pipe, prefix: str) -> dict[str, str]:
    """For each name of a parameter its first one, in the order of the model; those of other ranks too."""
    first_name_of = {id(parameter): name.removeprefix(prefix) for name, parameter in pipe.named_parameters()}
    named_parameters = pipe.named_parameters(remove_duplicate=False)
    local_names = {name.removeprefix(prefix): first_name_of[id(parameter)] for name, parameter in named_parameters}
    return {**local_names, **pipe.runtime.first_names}


def _counted_elsewhere(pipe: Pipe) -> set[int]:
    """The ids of this rank's copies of tied parameters that another rank counts."""
    runtime = pipe.runtime
    return {id(copy) for tie, copy in runtime.tied() if copy is not None and tie.owner != runtime.rank}


def _check_ties(pipe: Pipe, sum_over: Callable[[Tensor], Tensor], entries: Mapping[str, Tensor]) -> None:
    """Raise if the entries for a tied parameter are not the same on all ranks that have it."""
    runtime = pipe.runtime
    tied = runtime.tied()
    if not tied:
        return
    table = torch.zeros(len(tied), runtime.ranks, **HOST)
    local_names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    for row, (_, copy) in zip(table, tied, strict=True):
        part = entries.get(local_names.get(id(copy), ""))
        if part is not None:
            row[runtime.rank] = digest(values_in_words([part])) % (1 << 48)
    for row, (tie, _) in zip(sum_over(table), tied, strict=True):
        if len({float(row[rank]) for rank in tie.holders}) > 1:
            names = " = ".join(dict.fromkeys(f"'{name}'" for _, name in tie.readers))
            raise MismatchError(
                f"the entries for the tied parameter {names} differ between ranks {list(tie.holders)}: it is one "
                "parameter. Give the same entries on each, for example drawn from a generator seeded alike."
            )


@contextmanager
def _collective(pipe: Pipe) -> Iterator[None]:
    """Within: what fails on one rank fails on all; at the end all have come so far."""
    with turn(), pipe.runtime.communicator("curvature") as communicator:
        yield
        communicator.open(lambda values: {"the curvature": "a vector"}, draws=False)


def _sum_over_ranks(pipe: Pipe, numbers: Tensor) -> Tensor:
    with turn(), pipe.runtime.communicator("curvature") as communicator:
        return communicator.exchange.sum_over(numbers)
