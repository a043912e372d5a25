"""Which parameters, of what?

    Hessian(pipe, ...)                          all that require a gradient
    Hessian(pipe, ..., params="3")              those of layer 3; also a list of names, or a predicate(name, parameter)
    Hessian(module, ...)                        a Pipe of one stage around it, for the analysis
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pipeline.curvature.sharded import Member, ParameterSpace
from pipeline.pipe import Pipe
from pipeline.turns import turn

Params: TypeAlias = str | Iterable[str] | Callable[[str, nn.Parameter], bool] | None


def as_pipe(model: nn.Module) -> tuple[Pipe, str]:
    """A Pipe of the same layers; and what its parameters' names begin with that the model's do not.

    Raises:
        TypeError: no module.
        ValueError: a plain module on several devices, or a Pipe with replicas.
    """
    if isinstance(model, Pipe):
        if model._replicas is not None:
            raise ValueError(
                "the Pipe has replicas, which train on other mini-batches. Build one without replicas= on each group, "
                "and give all of the data to it."
            )
        return model, ""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}. Give a Pipe or a torch.nn.Module.")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the module is on several devices ({sorted(map(str, devices))}). Wrap it: Pipe(module, balance, devices="
            "[...])."
        )
    is_cut = type(model) is nn.Sequential and len(model) > 0
    layers = model if isinstance(model, nn.Sequential) and is_cut else nn.Sequential(model)
    pipe = Pipe(layers, [len(layers)], devices=list(devices) or ["cpu"])
    return pipe, "" if is_cut else "0."


def chosen(named: Sequence[tuple[str, nn.Parameter]], params: Params, everywhere: Sequence[str]) -> list[str]:
    """The names of the parameters that are wanted, of those here.

    Args:
        named: the parameters here.
        params: see above; a name is a parameter's, or the beginning of several up to a dot.
        everywhere: the names of all parameters, other processes' too.

    Raises:
        ValueError: a name stands for no parameter, or for none that requires a gradient.
    """
    trained = {name for name, parameter in named if parameter.requires_grad}
    if params is None:
        return [name for name, _ in named if name in trained]
    if callable(params):
        return [name for name, parameter in named if name in trained and params(name, parameter)]
    wanted = [params] if isinstance(params, str) else list(params)
    for each in wanted:
        if not any(_stands_for(each, name) for name in everywhere):
            raise ValueError(f"params has {each!r}, which is no parameter or layer. There are {_few(everywhere)}.")
        here = [name for name, _ in named if _stands_for(each, name)]
        if here and trained.isdisjoint(here):
            raise ValueError(
                f"params has {each!r}, but {_few(here)} do not require a gradient. Call requires_grad_() first."
            )
    return [name for name, _ in named if name in trained and any(_stands_for(each, name) for each in wanted)]


def _stands_for(wanted: str, name: str) -> bool:
    return name == wanted or name.startswith(wanted + ".")


def _few(names: Sequence[str]) -> str:
    return str(list(names)) if len(names) <= 6 else f"{list(names[:6])} and {len(names) - 6} more"


def space_of(pipe: Pipe, prefix: str, params: Params) -> ParameterSpace:
    """The vectors of a Pipe's parameters; on several ranks all make it together.

    Raises:
        ValueError: nothing is left, or a parameter is complex.
    """
    named = [(name.removeprefix(prefix), parameter) for name, parameter in pipe.named_parameters()]
    company = pipe._company
    everywhere = [name for name, _ in named] if company is None else list(company.first_names)
    names = set(chosen(named, params, everywhere))
    members, is_double = [], False
    elsewhere = _counted_elsewhere(pipe)
    for name, parameter in named:
        if name not in names:
            continue
        if not parameter.is_floating_point():
            raise ValueError(
                f"'{name}' is {parameter.dtype}. Curvature is that of a function of real numbers: keep its real and "
                "imaginary parts as two parameters (torch.view_as_complex), or leave it out with params=."
            )
        is_double = is_double or parameter.dtype == torch.float64
        first = name if company is None else company.first_names.get(name, name)
        members.append(Member(name, first, parameter.shape, parameter.device, id(parameter) not in elsewhere))
    sum_over = _alone if company is None else _summing(pipe)
    is_double = bool(sum_over(torch.tensor([float(is_double)], dtype=torch.float64)).item())
    rank, ranks = (0, 1) if company is None else (company.ranks.rank, company.ranks.size)
    space = ParameterSpace(members, torch.float64 if is_double else torch.float32, rank, ranks, sum_over)
    if space.size == 0:
        raise ValueError(
            f"there is no parameter to differentiate by (params={params!r}): none is chosen, or all are frozen. "
            "Call requires_grad_(), or choose others."
        )
    return space


def _counted_elsewhere(pipe: Pipe) -> set[int]:
    """The ids of this rank's copies of tied parameters that another rank counts."""
    if pipe._company is None:
        return set()
    hosting = pipe._company.hosting
    copies = zip(hosting.ties, hosting.tied(pipe), strict=True)
    return {id(copy) for tie, copy in copies if copy is not None and tie.owner != hosting.rank}


def _alone(numbers: Tensor) -> Tensor:
    return numbers


def _summing(pipe: Pipe) -> Callable[[Tensor], Tensor]:
    def sum_over(numbers: Tensor) -> Tensor:
        with turn(), pipe._peers("curvature") as peers:
            return peers.sum_over(numbers)

    return sum_over
