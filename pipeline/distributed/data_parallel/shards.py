"""Shards of gradients: each replica computes the means of as many numbers as any other.

    parameters of a bucket [ 0.weight | 0.bias | 2.weight             | 2.bias ]
    shards of 2 replicas   [ replica 0             | replica 1                 ]     a weight may be in both

A bucket is what travels together: the parameters of one stage, which are final when its last backward has run, or of a
few small ones; and at the end the rest, which several stages read, or only the loss. Buckets and shards follow from the
parameters alone, so all replicas cut alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from pipeline.common.module_tables import read_by_several
from pipeline.execution.communicator import Pair

SMALL = 2**20  # bytes: less does not travel alone


class Piece(NamedTuple):
    """A stretch of a parameter's numbers, flattened.

    Attributes:
        parameter: its number in its bucket.
        begin, end: the stretch. A parameter's first one begins at 0.
    """

    parameter: int
    begin: int
    end: int


class GradientBucket(NamedTuple):
    """Parameters whose gradients travel together.

    Attributes:
        stages: those whose own parameters these are, from late to early.
        parameters: in that order, each stage's in the order of its modules.
    """

    stages: tuple[int, ...]
    parameters: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """The name of its messages."""
        return f"stages {', '.join(map(str, self.stages))}" if self.stages else "no stage"


class BucketLayout(NamedTuple):
    """The parameters of a process whose gradients travel to its replicas, in buckets.

    Attributes:
        buckets: in the order in which they travel: late stages, which are final first. The last one has the rest, too.
        parameters: all, in the order of the modules.
    """

    buckets: tuple[GradientBucket, ...]
    parameters: tuple[Tensor, ...]


def layout_of(stages: Mapping[int, Sequence[nn.Module]], tied_ids: Collection[int] = ()) -> BucketLayout:
    """The layout of a process.

    Args:
        stages: the layers of each stage that this process has.
        tied_ids: the ids of parameters that other processes have too.

    Example:
        >>> layers = {stage: [nn.Linear(512, 512)] for stage in range(4)}
        >>> layout = layout_of({**layers, 4: [nn.Linear(512, 2)]})
        >>> [(bucket.name, len(bucket.parameters)) for bucket in layout.buckets]
        [('stages 4, 3', 4), ('stages 2', 2), ('stages 1', 2), ('stages 0', 2), ('no stage', 0)]
    """
    by_stage = {
        stage: {id(parameter): parameter for layer in layers for parameter in layer.parameters()}
        for stage, layers in sorted(stages.items())
    }
    shared_ids = read_by_several(stages.values()).union(tied_ids)
    all_parameters = {key: parameter for parameters in by_stage.values() for key, parameter in parameters.items()}
    shared = {key: parameter for key, parameter in all_parameters.items() if key in shared_ids}
    buckets, last = [], GradientBucket((), ())
    for stage in reversed(by_stage):
        stage_parameters = [parameter for key, parameter in by_stage[stage].items() if key not in shared]
        last = GradientBucket((*last.stages, stage), (*last.parameters, *stage_parameters))
        if sum([parameter.numel() * parameter.element_size() for parameter in last.parameters]) >= SMALL:
            buckets.append(last)
            last = GradientBucket((), ())
    last = GradientBucket(last.stages, (*last.parameters, *shared.values()))
    return BucketLayout((*buckets, last), tuple(all_parameters.values()))


def with_external(layout: BucketLayout, pairs: Sequence[Pair]) -> GradientBucket:
    """The last bucket, with parameters that are trained with the module but are not its own, those of a loss."""
    module_ids = {id(parameter) for parameter in layout.parameters}
    external = [owner for owner, _ in pairs if id(owner) not in module_ids and isinstance(owner, nn.Parameter)]
    last = layout.buckets[-1]
    return GradientBucket(last.stages, (*last.parameters, *external))


def shards_of(sizes: Sequence[int], count: int) -> list[list[Piece]]:
    """Cut a row of parameters into shards of as many numbers.

    Args:
        sizes: how many numbers each parameter has.
        count: how many shards.

    Returns:
        The pieces of each shard. The first piece of a parameter is there even if it is empty.

    Example:
        >>> shards_of([3, 5], 2)
        [[Piece(parameter=0, begin=0, end=3), Piece(parameter=1, begin=0, end=1)], [Piece(parameter=1, begin=1, end=5)]]
    """
    total = sum(sizes)
    ends = [total * (shard + 1) // count for shard in range(count)]
    shards: list[list[Piece]] = [[] for _ in range(count)]
    shard, first = 0, 0
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            while ends[shard] <= first + begin:
                shard += 1
            end = min(size, ends[shard] - first)
            shards[shard].append(Piece(index, begin, end))
            begin = end
        if size == 0:
            shards[shard].append(Piece(index, 0, 0))
        first += size
    return shards
