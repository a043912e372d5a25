"""The settings of a Pipe: what it was built with, and what can be set on it later.

    Pipe(module, ...)  --checked-->  Settings, with the Layout of its stages and the Processes that share it
    pipe.chunks = 8    --checked-->  new Settings, in the place of the old ones
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from pipeline.common.arguments import check_flags, shown
from pipeline.data.pytrees import parts_of
from pipeline.distributed.assignment import TiedParameter
from pipeline.distributed.data_parallel.replicas import Replicas
from pipeline.distributed.group import RankGroup
from pipeline.distributed.topology import PipeTopology
from pipeline.entry.origin import Origin
from pipeline.entry.plans import Plans
from pipeline.entry.validation import check_placement, check_schedule
from pipeline.execution.setup import Layout
from pipeline.recompute.policy import Policy
from pipeline.stage.batchnorm import check_deferrable
from scheduler import Schedule, verify


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes that share a Pipe.

    Attributes:
        ranks: run it together. None: this one runs every stage.
        parameters: those of the whole model, on which all processes agree, in words: a line each.
        topology: the assignment of stages to these ranks, once they have agreed on it.
        copies: this rank's, of tied parameters, as the Pipe was built.
        replicas: the pipelines that train the same stages on other mini-batches.
    """

    ranks: RankGroup | None
    parameters: str
    topology: PipeTopology | None = None
    copies: Mapping[TiedParameter, Tensor] = field(default_factory=dict)
    replicas: Replicas | None = None


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings of a Pipe. The arguments of `Pipe` say what each means.

    Attributes:
        layout: where its stages are.
        processes: that share it.
        balance: the number of layers of each stage.
        chunks: the largest number of chunks.
        plans: of the schedule.
        checkpoint: which activations are computed again.
        batch_dim: the dim that counts rows.
        mixes_rows: layers may look at all rows of a chunk.
        deferred_batch_norm: running statistics are updated once for each mini-batch.
        takes_arguments: the first layer takes the arguments of a model's forward.
        origin: of the layers.
    """

    layout: Layout
    processes: Processes
    balance: tuple[int, ...]
    chunks: int
    plans: Plans
    checkpoint: Policy
    batch_dim: int
    mixes_rows: bool
    deferred_batch_norm: bool
    takes_arguments: bool
    origin: Origin

    @property
    def schedule(self) -> Schedule:
        """The schedule of a mini-batch of as many chunks as were asked for."""
        return self.plans.resolved(self.chunks)

    @cached_property
    def words(self) -> str:
        """A description, in lines, on which all processes agree."""
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else "a function of (stage, chunk)"
        return (
            f"balance {list(self.balance)}\nchunks {self.chunks}\nbatch_dim {self.batch_dim}\n"
            f"mixes_rows {self.mixes_rows}\nschedule {self.plans.given}\ncheckpoint {checkpoint}\n"
            f"deferred_batch_norm {self.deferred_batch_norm}\n{self.processes.parameters}"
        )


def plans_of(
    schedule: str | Schedule, balance: Sequence[int], chunks: int, layout: Layout, processes: Processes
) -> Plans:
    """The plans of a schedule, which must fit the stages.

    Raises:
        TypeError: it is neither a name nor a Schedule.
        ScheduleError: it is for other stages, or puts them on other ranks than those which have their layers.
    """
    if not isinstance(schedule, str | Schedule):
        raise TypeError(f"schedule is {shown(schedule)}. Give a name of scheduler.names(), or a Schedule.")
    if isinstance(schedule, Schedule):
        verify(schedule)
        check_schedule(schedule, len(balance))
    ranks = None if processes.ranks is None else (processes.ranks.size, processes.ranks.rank)
    plans = Plans(schedule, layout.places, layout.values, ranks)
    resolved = plans.resolved(chunks)
    check_schedule(resolved, len(balance))
    if processes.topology is not None:
        check_placement(resolved, processes.topology.assignment.rank_of)
    return plans


def check_deferred(deferred: bool, module: nn.Module) -> bool:
    """Whether batch norms update their statistics once for each mini-batch.

    Raises:
        TypeError: no flag; or a batch norm whose statistics are not those of its own input.
    """
    check_flags(deferred_batch_norm=deferred)
    if deferred:
        check_deferrable(module)
    return deferred


def layers_by_stage(layers: Iterable[nn.Module], balance: Sequence[int]) -> list[list[nn.Module]]:
    """The layers of each stage.

    Raises:
        ValueError: there are more or fewer than the balance says.
    """
    all_layers = list(layers)
    if len(all_layers) != sum(balance):
        raise ValueError(
            f"the Pipe has {len(all_layers)} layers but its balance is {list(balance)}: one was added or removed "
            "since. Change the nn.Sequential first and wrap it anew: Pipe(module, balance, chunks)."
        )
    return list(map(list, parts_of(all_layers, balance)))
