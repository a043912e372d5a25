"""The assignment of stages to ranks, and the parameters that have copies on several ranks (tied ones).

    schedule --placement--> rank of each stage        stage 0 --> rank 0, stage 1 --> rank 1, ...
    the whole module's structure --> tied             '0.weight' (stage 0, rank 0) = '5.weight' (stage 3, rank 1)

Every rank knows the structure of the whole module (on the meta device, if it is large), so all compute the same
assignment without communication. A tied parameter's owner is the rank of the first stage that reads it.

Ranks share no memory, so a tied parameter has a copy on each rank that reads it. Its owner adds the stages' sums in the
order of the stages, as one process does, and sends the whole gradient to every copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor, nn

from pipeline.execution.engine import merged_order, needs_of
from scheduler import Placement, Schedule, ScheduleError, by_name


class TiedParameter(NamedTuple):
    """A parameter that stages of several ranks read.

    Attributes:
        name: its first name in the plain module.
        readers: the stages that read it, ascending, with its name there.
        owner: the rank whose values count and which adds up the gradients.
        holders: all ranks that have a copy, the owner first.
    """

    name: str
    readers: tuple[tuple[int, str], ...]
    owner: int
    holders: tuple[int, ...]


class StageAssignment(NamedTuple):
    """The ranks of all stages, and the tied parameters.

    Attributes:
        rank: this one.
        rank_of: the rank of each stage.
        tied_parameters: those that several ranks have.
    """

    rank: int
    rank_of: tuple[int, ...]
    tied_parameters: tuple[TiedParameter, ...]

    @property
    def own_stages(self) -> list[int]:
        """This rank's stages."""
        return [stage for stage, rank in enumerate(self.rank_of) if rank == self.rank]

    @property
    def last(self) -> int:
        """The rank that makes the output."""
        return self.rank_of[-1]

    @property
    def tied_pairs(self) -> list[tuple[int, int]]:
        """The ordered pairs of ranks between which gradients of tied parameters travel."""
        pairs = [(tied.owner, rank) for tied in self.tied_parameters for rank in tied.holders[1:]]
        return [pair for owner, holder in pairs for pair in ((owner, holder), (holder, owner))]

    def copies_in(self, module: nn.Module) -> dict[TiedParameter, Tensor]:
        """This rank's copies of tied parameters; without those that are parameters no more, as parametrized ones."""
        own_names = {
            tied: [name for stage, name in tied.readers if self.rank_of[stage] == self.rank]
            for tied in self.tied_parameters
        }
        copies: dict[TiedParameter, Tensor] = {}
        for tied, names in own_names.items():
            with suppress(AttributeError):
                copies.update({tied: module.get_parameter(name) for name in names[:1]})
        return copies


def assign(stages: Sequence[nn.Sequential], rank_of: Sequence[int], rank: int) -> StageAssignment:
    """The assignment of a module's stages, all of which are known.

    Args:
        stages: all stages.
        rank_of: the rank of each.
        rank: this one.
    """
    readers: dict[int, list[tuple[int, str]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            readers.setdefault(id(parameter), []).append((index, name))
    tied = []
    for uses in readers.values():
        holders = tuple(dict.fromkeys(rank_of[stage] for stage, _ in uses))
        if len(holders) > 1:
            tied.append(TiedParameter(uses[0][1], tuple(uses), holders[0], holders))
    return StageAssignment(rank, tuple(rank_of), tuple(tied))


def schedule_named(name: str, stages: int, chunks: int) -> Schedule:
    """The schedule of this name for so many stages, on as many lanes as that makes."""
    per_lane = _stages_per_lane(name, chunks)
    if stages % per_lane:
        raise ScheduleError(
            f"schedule {name} has {per_lane} stages a lane but the balance has {stages}, no multiple of that. Use a "
            f"balance of {stages - stages % per_lane + per_lane} stages, or a schedule with one stage a lane, such as "
            "1f1b."
        )
    return by_name(name, stages // per_lane, chunks)


def schedule_over(name: str, stages: int, chunks: int, ranks: int) -> Schedule:
    """The schedule of this name for so many stages on so many ranks.

    Where its lanes may have several stages, there is a lane for each rank; else a rank has several lanes.

    Example:
        >>> schedule_over("1f1b", stages=4, chunks=2, ranks=2).placement
        Placement(lane_of=(0, 0, 1, 1))
        >>> schedule_over("interleaved", stages=6, chunks=2, ranks=2).placement
        Placement(lane_of=(0, 1, 0, 1, 0, 1))
    """
    per_lane = _stages_per_lane(name, chunks)
    if per_lane > 1 and stages % ranks:
        raise ScheduleError(
            f"schedule {name} has as many stages on one rank as on another, but the balance has {stages} stages for "
            f"{ranks} ranks. Use a multiple of {ranks}, such as {ranks * per_lane}, or a schedule such as 1f1b."
        )
    if name in _ANY_STAGES_PER_LANE and stages != per_lane * ranks:
        return by_name(name, ranks, chunks, stages_per_lane=stages // ranks)
    return on_ranks(schedule_named(name, stages, chunks), ranks)


def on_ranks(schedule: Schedule, ranks: int) -> Schedule:
    """A schedule with a lane for each rank; where it has more lanes, neighbours are merged in the order of one process.

    Raises:
        ScheduleError: there are fewer lanes than ranks.
    """
    lanes = schedule.lanes
    if lanes == ranks:
        return schedule
    if lanes < ranks:
        raise ScheduleError(
            f"schedule {schedule.name} has {lanes} lanes for {ranks} ranks, so {ranks - lanes} would have nothing to "
            f"do. Use at least {ranks * schedule.stages // lanes} stages, or fewer ranks (group=...)."
        )
    rank_of_lane = [lane * ranks // lanes for lane in range(lanes)]
    rank_of = [rank_of_lane[lane] for lane in schedule.placement.lane_of]
    merged = merged_order(schedule.orders, needs_of(schedule.orders, schedule.stages, schedule.split))
    orders = tuple(tuple(action for action in merged if rank_of[action.stage] == rank) for rank in range(ranks))
    return Schedule(schedule.name, Placement(tuple(rank_of)), schedule.chunks, orders)


def _stages_per_lane(name: str, chunks: int) -> int:
    return by_name(name, 1, max(chunks, 2)).stages  # some are for two chunks a lane or more


_ANY_STAGES_PER_LANE = ("interleaved", "interleaved-zb", "looped-bfs")
