"""The vectors of a Pipe's parameters: the shard and the entries that each parameter has.

    'net.0.weight' on cuda:0  --> shard 0, entries 0 .. 4096          each shard is one flat tensor
    'net.7.weight' on cuda:1  --> shard 1, entries 0 .. 4096
    a tied weight that another rank counts --> a shard of its own, that does not count

Parameters are found by name at each use, never kept: they may be replaced between two products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.common.arguments import few, shown
from pipeline.common.call_lock import turn
from pipeline.curvature.selection import ParamSelection, chosen
from pipeline.curvature.space import HOST, Space, Vec
from pipeline.distributed.agreement import values_in_words
from pipeline.execution.communicator import Communicator
from pipeline.pipe import Pipe
from scheduler.errors import whole


class VectorSlice(NamedTuple):
    """The place of a parameter's entries in a vector."""

    shard: int
    start: int
    shape: torch.Size

    def view(self, vec: Vec) -> Tensor:
        """The entries, in the parameter's shape; on the memory of `vec`."""
        return vec[self.shard].narrow(0, self.start, self.shape.numel()).view(self.shape)


class ParameterSpace(Space):
    """Vectors with an entry for each entry of some parameters of a Pipe; on several ranks all make it together.

    Args:
        pipe: the Pipe.
        prefix: the beginning of its parameters' names that those of the space do not have.
        params: of which parameters, see `chosen`.

    Attributes:
        slots: the place of each parameter of this process, by its first name, in the order of the model.

    Raises:
        TypeError: params is neither names nor a function.
        ValueError: nothing is left, or a parameter is complex.
        MismatchError: the ranks were given different params.
    """

    def __init__(self, pipe: Pipe, prefix: str, params: ParamSelection) -> None:
        self._pipe, self._prefix, runtime = pipe, prefix, pipe.runtime
        self.rank, self.ranks = runtime.rank, runtime.ranks
        if isinstance(params, nn.Module) or params is not None and not isinstance(params, Iterable | Callable):
            raise TypeError(f"params is {shown(params)}. Give names of layers or parameters, or a function of both.")
        if params is not None and not isinstance(params, str) and not callable(params):
            params = sorted(params, key=str)  # of a set: in one order on all ranks
        words = getattr(params, "__qualname__", "a function") if callable(params) else repr(params)
        elsewhere = {id(copy) for tie, copy in runtime.tied().items() if tie.owner != self.rank}
        sizes: dict[tuple[torch.device, bool], int] = {}
        dtypes: set[torch.dtype] = set()
        self.slots: dict[str, VectorSlice] = {}
        with self._together() as communicator:  # what is refused on one rank is refused on all
            communicator.open(lambda values: {"params": words}, draws=False)
            parameters = {name.removeprefix(prefix): parameter for name, parameter in pipe.named_parameters()}
            pairs = runtime.first_names.items()
            names = {name.removeprefix(prefix): first.removeprefix(prefix) for name, first in pairs}
            for name in chosen(parameters, params, names):
                parameter = parameters[name]
                if not parameter.is_floating_point():
                    raise ValueError(
                        f"'{name}' is {parameter.dtype}. Curvature is that of a function of real numbers: keep its "
                        "real and imaginary parts as two parameters (torch.view_as_complex), or leave it out with "
                        "params=."
                    )
                key = (parameter.device, id(parameter) not in elsewhere)
                start = sizes.setdefault(key, 0)
                self.slots[name] = VectorSlice(list(sizes).index(key), start, parameter.shape)
                sizes[key] += parameter.numel()
                dtypes.add(parameter.dtype)
            is_double = communicator.exchange.any(torch.float64 in dtypes)
        self.dtype = torch.float64 if is_double else torch.float32
        self._shards = [(size, device) for (device, _), size in sizes.items()]
        self.counted = [counts for _, counts in sizes]
        local_size = sum(size for (_, counts), size in sizes.items() if counts)
        self.size = int(self.sum_over(torch.tensor([local_size], **HOST)).item())
        if self.size == 0:
            raise ValueError(
                f"there is no parameter to differentiate by (params={params!r}): none is chosen, or all are frozen. "
                "Call requires_grad_(), or choose others."
            )

    @contextmanager
    def _together(self) -> Iterator[Communicator]:
        """Within: what fails on one rank fails on all."""
        with turn(), self._pipe.runtime.communicator("curvature") as communicator:
            yield communicator

    def parameters(self) -> dict[str, nn.Parameter]:
        """This process's parameters, as they are now, by name.

        Raises:
            ValueError: one is gone, frozen or of another shape since.
        """
        with turn():
            named = {name.removeprefix(self._prefix): parameter for name, parameter in self._pipe.named_parameters()}
        for name, slot in self.slots.items():
            parameter = named.get(name)
            if parameter is None or not parameter.requires_grad or parameter.shape != slot.shape:
                state = (
                    "gone" if parameter is None else "frozen" if not parameter.requires_grad else list(parameter.shape)
                )
                raise ValueError(
                    f"parameter '{name}' was of shape {list(slot.shape)} and trained when the operator was made; it "
                    f"is {state} now. Make a new operator."
                )
        return {name: named[name] for name in self.slots}

    def restricted(self, names: Collection[str]) -> ParameterSpace:
        """That of some of its parameters, by names of all ranks."""
        return ParameterSpace(self._pipe, self._prefix, names)

    def zeros(self) -> Vec:
        return [torch.zeros(size, dtype=self.dtype, device=device) for size, device in self._shards]

    def random(self, kind: str, seed: int, index: int) -> Vec:
        if kind not in ("rademacher", "normal"):
            raise ValueError(f"kind is {kind!r}. Use 'rademacher' (+1 or -1) or 'normal'.")
        number = whole(seed)
        if number is None:
            raise TypeError(f"seed is {shown(seed)}. Give a whole number.")
        vec = self.zeros()
        for name, view in self.named(vec).items():
            view.copy_(_drawn(kind, number, index, name, view.shape))
        return vec

    def sum_over(self, numbers: Tensor) -> Tensor:
        with self._together() as communicator:
            return communicator.exchange.sum_over(numbers)

    def rows(self, value: Any) -> list[Any]:
        with self._together() as communicator:
            return communicator.exchange.rows(value)

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return {name: slot.view(vec) for name, slot in self.slots.items()}

    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        with self._together() as communicator:
            vec = self._checked_vec(named)
            communicator.open(lambda values: {"the curvature": "a vector"}, draws=False)  # all have come so far
            entries = self.named(vec)
            parts = {id(parameter): entries.get(name) for name, parameter in self._pipe.named_parameters()}
            communicator.gradients.check_alike(
                lambda copy: values_in_words([] if (part := parts[id(copy)]) is None else [part]),
                "the entries for the tied parameter {0} differ between ranks {1}: it is one parameter. Give the same "
                "entries on each, for example drawn from a generator seeded alike."
            )
        return vec

    def _checked_vec(self, named: Mapping[str, Tensor]) -> Vec:
        unknown = [name for name in named if name not in self.slots]
        missing = [name for name in self.slots if name not in named]
        if unknown or missing:
            raise KeyError(
                f"a vector has one entry for each parameter: {unknown or 'none'} are no parameters here, "
                f"{missing or 'none'} are missing. Give zeros for those that you leave out; the names are "
                f"{few(self.slots)}."
            )
        vec = self.zeros()
        for name, slot in self.slots.items():
            entries = named[name]
            if entries.shape != slot.shape:
                raise ValueError(
                    f"the entries for '{name}' have shape {list(entries.shape)}, the parameter has {list(slot.shape)}."
                )
            slot.view(vec).copy_(entries.detach())
        return vec


def _drawn(kind: str, seed: int, index: int, name: str, shape: torch.Size) -> Tensor:
    """By name, so that it does not matter who else is there, and on the CPU, so that it does not matter where."""
    digest = hashlib.sha256(f"{seed} {index} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    if kind == "normal":
        return torch.randn(shape, generator=generator, **HOST)
    return torch.randint(2, shape, generator=generator, device="cpu", dtype=torch.int8) * 2 - 1
