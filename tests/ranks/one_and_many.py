"""Does a script give on several ranks what it gives in one process? It is run twice, and what it returns is compared.

    script(make, ...) -> {"loss 0": ..., "0.weight": ..., ...}      make(model, balance, chunks, ...) builds the Pipe

    once with make = a Pipe in this process     {"loss 0", "0.weight", "1.weight"}    all there is to know
    once with make = a Pipe over the ranks      {"loss 0", "0.weight"}                this rank's part: the same bits

Once its Pipe is built a rank has a seed of its own, as in a script that sets none; rank 0's is that of the one process.
The ranks divide among them what one process does in a job's cases.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cover import some
from crew import Crew
from law_check import same
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeline import Pipe

SEED = 17

Found = dict[str, Any]
Make = Callable[..., Pipe]


class Compared(NamedTuple):
    """One rank's comparison.

    Attributes:
        wrong: what differs, in words.
        here: the names of what this rank knows.
        all: the names of what one process knows.
    """

    wrong: list[str]
    here: list[str]
    all: list[str]


def in_one_process(model: nn.Sequential, balance: Iterable[int], *args: Any, **settings: Any) -> Pipe:
    balance = list(balance)
    pipe = Pipe(model, balance, *args, devices=["cpu"] * len(balance), **settings)
    torch.manual_seed(SEED)
    return pipe


def over_ranks(model: nn.Sequential, *args: Any, **settings: Any) -> Pipe:
    pipe = Pipe(model, *args, **settings)
    rank = dist.get_rank()
    torch.manual_seed(SEED if rank == 0 else 1000 + rank)
    return pipe


def compare_all(script: str, cases: Iterable[tuple[Any, ...]]) -> list[Compared]:
    """Run a script both ways with these arguments, one case after the other."""
    module, _, name = script.partition(":")
    function = getattr(importlib.import_module(module), name)
    return compared(cases, lambda case: function(in_one_process, *case), lambda case: function(over_ranks, *case))


def compared(
    cases: Iterable[Any],
    alone: Callable[[Any], Found],
    here: Callable[[Any], Found],
    differ: Callable[[Found, Found], list[str]] | None = None,
) -> list[Compared]:
    """In each case, what this rank knows against what one process knows.

    Args:
        cases: the same on all ranks.
        alone, here: what one process knows, and this rank.
        differ: how two Found differ, in words; by default in any bit.
    """
    cases = list(cases)
    results = []
    for case, known in zip(cases, divided(alone, cases), strict=True):
        try:
            if isinstance(known, Failed):
                raise AssertionError(f"in one process: {known.words}")
            found = here(case)
            results.append(Compared((differ or differences)(found, known), list(found), list(known)))
        except Exception as error:  # is a difference like any other: the cases after it are run too
            results.append(Compared([f"{type(error).__name__}: {error}", traceback.format_exc()], [], []))
    return results


class Failed(NamedTuple):
    """What was raised instead of a result."""

    words: str


def divided(function: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """function(case) of each case, or Failed, on all ranks; each case is one rank's work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts: list[list[Any]] = [[] for _ in range(size)]
    dist.all_gather_object(parts, [_tried(function, case) for case in cases[rank::size]])
    return [parts[place % size][place // size] for place in range(len(cases))]


def _tried(function: Callable[[Any], Any], case: Any) -> Any:
    try:
        return function(case)
    except Exception:
        return Failed(traceback.format_exc())


def differences(
    here: Mapping[str, Any], alone: Mapping[str, Any], alike: Callable[[Any, Any], bool] = same
) -> list[str]:
    """What this rank knows otherwise than one process, or knows in addition. `alike`: a judge of two values."""
    found = []
    for name, value in here.items():
        if name not in alone:
            found.append(f"{name} is known here alone")
        else:
            found += [f"{name}{words}" for words in _unlike(value, alone[name], alike)]
    return found


def _unlike(one: Any, other: Any, alike: Callable[[Any, Any], bool]) -> list[str]:
    left, spec = pytree.tree_flatten_with_path(one)
    right, other_spec = pytree.tree_flatten_with_path(other)
    if spec != other_spec:
        return [f": {spec} instead of {other_spec}"]
    return [
        f"{pytree.keystr(path)}: {_short(mine)} instead of {_short(theirs)}"
        for (path, mine), (_, theirs) in zip(left, right, strict=True)
        if not alike(_on_host(mine), _on_host(theirs))
    ]


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)} {value.detach().flatten()[:3].tolist()}"
    return repr(value)


def state_of(pipe: Pipe, when: object = "") -> Found:
    """A Pipe's parameters, their gradients, and its buffers, as they are now: those that this process has."""
    copies: Found = {}
    for name, parameter in pipe.named_parameters():
        copies[f"{when} {name}"] = parameter.detach().clone()
        copies[f"{when} {name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
    for name, buffer in pipe.named_buffers():
        copies[f"{when} {name}"] = buffer.clone()
    return copies


# --------------------------------------------------------------------------------------------------- for the tests


def agree(crew: Crew, script: str, *args: Any, timeout: float = 60.0) -> None:
    """Assert that a script gives the same in one process and on the ranks, and that the ranks know everything."""
    agree_all(crew, script, [args], timeout)


def agree_all(crew: Crew, script: str, cases: Iterable[tuple[Any, ...]], timeout: float = 120.0) -> None:
    """The same for some arguments (cover.py), in one job."""
    cases = some(cases)
    check_all(cases, crew.run("one_and_many:compare_all", script, cases, timeout=timeout))


def apportioned(
    crews: Iterable[Crew], cases_of: Callable[[int], Iterable[Any]]
) -> list[tuple[Crew, list[Any]]]:
    """Each crew's cases, of which some are chosen (cover.py) with the number of ranks as one more value of a case.

    Args:
        crews: on which a law is tested.
        cases_of: the cases for so many ranks, each a tuple or a dict.
    """
    pairs = [(crew, case) for crew in crews for case in cases_of(crew.size)]
    rows = [
        {"ranks": crew.size, **(case if isinstance(case, Mapping) else dict(enumerate(case)))} for crew, case in pairs
    ]
    kept = {id(row) for row in some(rows)}
    chosen: dict[Crew, list[Any]] = {}
    for (crew, case), row in zip(pairs, rows, strict=True):
        if id(row) in kept:
            chosen.setdefault(crew, []).append(case)
    return list(chosen.items())


def agree_on(crews: Iterable[Crew], script: str, cases_of: Callable[[int], Iterable[tuple[Any, ...]]]) -> None:
    """`agree_all` on several crews, whose cases are apportioned."""
    for crew, cases in apportioned(crews, cases_of):
        check_all(cases, crew.run("one_and_many:compare_all", script, cases, timeout=120.0))


def check_all(cases: Sequence[Any], results: Sequence[Sequence[Compared]]) -> None:
    """Assert that all ranks agree with one process in each case, and that together they know everything."""
    faults = []
    for case, *ranks in zip(cases, *results, strict=True):
        faults += [f"{case}, rank {rank}: {found.wrong[0]}" for rank, found in enumerate(ranks) if found.wrong]
        missing = set(ranks[0].all).difference(*(found.here for found in ranks))
        faults += [f"{case}: no rank knows {sorted(missing)}"] if missing else []
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:10])
