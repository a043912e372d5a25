"""Placements: the lane that hosts each stage.

    lane_of[stage] = lane        linear(3)        loop(3, 6)       vee(3)
                       lane 0 |  0                0  3             0  5
                       lane 1 |  1                1  4             1  4
                       lane 2 |  2                2  5             2  3     (stages)

A loop wraps from the last lane round to the first (interleaved schedules); a vee turns in the last lane and goes back
(V schedules), so that the first lane hosts both ends.
"""

from dataclasses import dataclass
from functools import cached_property

from scheduler.errors import ScheduleError, whole_number


@dataclass(frozen=True)
class Placement:
    """The lane of each stage.

    Args:
        lane_of: the lane of each stage; every lane from 0 to the largest hosts a stage

    Raises:
        ScheduleError: there is no stage, `lane_of` is no tuple of whole numbers, or a lane hosts no stage.

    >>> Placement.vee(3)
    Placement(lane_of=(0, 1, 2, 2, 1, 0))
    >>> Placement.vee(3).stages_of(0)
    (0, 5)
    """

    lane_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.lane_of, tuple) or not self.lane_of:
            raise ScheduleError(
                f"lane_of is {self.lane_of!r}, but must be a tuple with the lane of each stage. Use (0, 1) for two."
            )
        lanes = (whole_number(f"lane_of[{stage}]", lane, least=0) for stage, lane in enumerate(self.lane_of))
        object.__setattr__(self, "lane_of", tuple(lanes))
        empty = sorted(set(range(self.lanes)) - set(self.lane_of))
        if empty:
            raise ScheduleError(
                f"lanes {empty} host no stage (lane_of: {self.lane_of}). Number the lanes from 0 without a gap."
            )

    @classmethod
    def linear(cls, lanes: int) -> "Placement":
        """One stage a lane."""
        return cls.loop(lanes, lanes)

    @classmethod
    def loop(cls, lanes: int, stages: int) -> "Placement":
        """Stage s on lane s modulo `lanes`.

        >>> Placement.loop(2, 4)
        Placement(lane_of=(0, 1, 0, 1))
        """
        lanes = whole_number("lanes", lanes, least=1)
        stages = whole_number("stages", stages, least=lanes)
        return cls(tuple(stage % lanes for stage in range(stages)))

    @classmethod
    def vee(cls, lanes: int) -> "Placement":
        """Two stages a lane, there and back."""
        lanes = whole_number("lanes", lanes, least=1)
        return cls((*range(lanes), *reversed(range(lanes))))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.lane_of)

    @cached_property
    def lanes(self) -> int:
        """The number of lanes."""
        return max(self.lane_of) + 1

    def stages_of(self, lane: int) -> tuple[int, ...]:
        """The stages that `lane` hosts, ascending."""
        return tuple(stage for stage, host in enumerate(self.lane_of) if host == lane)


class HasPlacement:
    """The part of whatever has a placement."""

    placement: Placement

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self.placement.lanes
