"""The trace by layer: what each layer's own diagonal block adds.

    z, A z --by name--> the sum of z * A z over the entries of a layer      for all layers, from one product
    mean = trace of the layer's own diagonal block; entries of other layers add variance, no bias

What HAWQ (Dong et al. 2019, arXiv 1911.03852) chooses the bits of each layer by. Over ranks each adds what it has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import shown
from pipeline.curvature.estimates.sampling import SampledResult, SampleSize, counted_entries, estimate
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.tables import plus_minus, table
from pipeline.curvature.space import HOST, Space, Vec


@dataclass(frozen=True, eq=False)
class LayerTraces(SampledResult):
    """The traces of the diagonal blocks of a matrix, one for each layer.

    Args:
        values: layer -> trace of its block.
        stderr: layer -> standard error; 0 if exact, inf if one draw is all there is.
        entries: layer -> rows of its block; value / entries is the mean eigenvalue.
    """

    values: dict[str, float]
    stderr: dict[str, float]
    entries: dict[str, int]

    def lines(self) -> Iterator[str]:
        yield f"traces of layers of {self.matrix}  ({self.cost})"
        cells = [["layer", "trace", "entries", "mean eigenvalue"]]
        for name, value in self.values.items():
            count = self.entries[name]
            cells.append([name, plus_minus(value, self.stderr[name]), f"{count:,}", f"{value / count:.4g}"])
        yield from table(cells)

    def draw(self, ax: Any) -> None:
        """A bar for each layer, with its standard error."""
        names, places = list(self.values), range(len(self.values))
        errors = [self.stderr[name] if self.samples > 1 else 0.0 for name in names]
        ax.bar(places, [self.values[name] for name in names], yerr=errors)
        ax.set_xticks(places, names, rotation=90)
        ax.set_ylabel(f"trace of the layer's block of {self.matrix}")


def layer_traces(
    A: LinearMap,
    groups: Mapping[str, Sequence[str]] | None = None,
    samples: int = 100,
    *,
    rel: float | None = None,
    abs: float | None = None,
    min_samples: int = 10,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> LayerTraces:
    """The trace of each layer's own block of A, all from the same products.

    With `samples` at least the size of A the result is exact. An entry that several processes have (tied weights)
    counts once, with the process that counts it in sums.

    Args:
        A: the matrix; over ranks every process makes the same call.
        groups: layer -> names of its parameters, those of all processes, the same on each. None: one for each module.
        samples: the most products to spend.
        rel: end where every layer's standard error is at most this times the magnitude of its trace.
        abs: end where every one is at most this. Of two bounds the looser one holds for each layer.
        min_samples: draws before the first look at the errors, which few draws often make far too small.
        seed: of the random vectors; equal seeds give equal results.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Returns:
        the same numbers on every process.

    Raises:
        ValueError: an argument means nothing, or a group is empty or has a name that no process has.
        MismatchError: the processes were given different groups.
        FloatingPointError: a product is not finite.

    Example: a chain of three weights, all 1, whose Hessian is 2 everywhere.
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)]).double()
        >>> for parameter in model.parameters():
        ...     _ = nn.init.ones_(parameter)
        >>> one = torch.ones(1, 1).double()
        >>> print(layer_traces(Hessian(model, (one, one), nn.functional.mse_loss), {"front": ["0.weight", "1.weight"]}))
        traces of layers of Hessian  (3 products, stopped by: exact)
          layer   trace  entries  mean eigenvalue
          front  4 +- 0        2                2
    """
    sampling = SampleSize(A, samples, "rademacher", rel, abs, min_samples, seed, show, resume, save_every)
    names_of, entries = parameter_names_by_layer(A.space, groups), counted_entries(A.space)

    def by_layer(vectors: list[Vec], products: list[Vec]) -> Tensor:
        local = [_local_sums(A.space, names_of, vec, product) for vec, product in zip(vectors, products, strict=True)]
        return A.space.sum_over(torch.stack(local))

    drawn = estimate(sampling, by_layer, "traces of layers", groups=names_of)
    return LayerTraces(
        drawn.spent,
        drawn.stopped,
        A.name,
        dict(zip(names_of, drawn.mean.tolist(), strict=True)),
        dict(zip(names_of, drawn.stderr.tolist(), strict=True)),
        {layer: sum([entries[name] for name in group]) for layer, group in names_of.items()},
    )


def _local_sums(space: Space, groups: Mapping[str, Sequence[str]], vec: Vec, product: Vec) -> Tensor:
    """z * A z summed over the entries of each group that count here: [groups]."""
    shards = zip(vec, product, space.counted, strict=True)
    terms = [vec_shard * product_shard * counts for vec_shard, product_shard, counts in shards]
    sums = {name: part.sum(dtype=torch.float64).cpu() for name, part in space.named(terms).items()}
    none = torch.zeros((), **HOST)
    return torch.stack([sum((sums.get(name, none) for name in group), none) for group in groups.values()])


def parameter_names_by_layer(space: Space, groups: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]]:
    """The names of the parameters of each layer, of all processes; of each module if no groups are given.

    Raises:
        TypeError: groups are no mapping.
        ValueError: a group is no list of names, or has a name that no process has.
    """
    names = list(counted_entries(space))
    return by_module(names) if groups is None else _checked_groups(groups, names)


def by_module(names: Sequence[str]) -> dict[str, list[str]]:
    """Parameters of one module together.

    Example:
        >>> by_module(["0.weight", "0.bias", "scale"])
        {'0': ['0.weight', '0.bias'], 'scale': ['scale']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return groups


def _checked_groups(groups: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    if not isinstance(groups, Mapping):
        raise TypeError(f"groups is {shown(groups)}: give layer -> names of its parameters, or None")
    for layer, group in groups.items():
        if isinstance(group, str) or not isinstance(group, Collection) or not group:
            raise ValueError(f"group {layer!r} is {shown(group)}: give a list of names of parameters")
    if not groups:
        raise ValueError("groups is empty: give layer -> names of its parameters, or None for a group for each module")
    for layer, group in groups.items():
        if len(set(group)) < len(group):
            raise ValueError(f"group {layer!r} has a name twice: {list(group)}; give each once")
    known = set(names)
    unknown = sorted({name for group in groups.values() for name in group} - known)
    if unknown:
        raise ValueError(f"no process has parameters named {unknown} that count; there are {list(names)}")
    return {str(layer): list(group) for layer, group in groups.items()}
