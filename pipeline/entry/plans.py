"""The schedule and the plan for a mini-batch of so many chunks.

    "1f1b" or a Schedule  --stages, ranks-->  Schedule  --plan.py-->  CallPlan; over ranks with the messages of this one

Each plan of a call is made once for a number of chunks and kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from pipeline.common.places import Place
from pipeline.data.values import Values
from pipeline.distributed.assignment import on_ranks, schedule_named, schedule_over
from pipeline.execution.plan import CallPlan, OneRank, plan_forward
from scheduler import Schedule, ScheduleError

Planner = Callable[[Schedule, Sequence[object], OneRank | None], CallPlan]


class Plans:
    """All plans of a Pipe under one schedule.

    Args:
        schedule: the schedule, or its name.
        places: the place of each stage.
        values: the table of values that cross stages.
        ranks: the number of ranks, and this rank. None: one process.
    """

    def __init__(
        self, schedule: str | Schedule, places: Sequence[Place], values: Values, ranks: tuple[int, int] | None
    ) -> None:
        self.given = schedule
        self._places = places
        self._ranks = ranks
        self._here = None if ranks is None else OneRank(ranks[1], values)
        self._has_said = False  # that a mini-batch is short
        self._plans: dict[tuple[int, Planner], CallPlan] = {}

    def schedule(self, chunks: int, pipe_chunks: int) -> Schedule:
        """The schedule, with a lane for each device or rank. For a shorter mini-batch, its first chunks.

        Args:
            chunks: of a mini-batch.
            pipe_chunks: the Pipe's `chunks`.

        Raises:
            ScheduleError: it is made for fewer chunks.
        """
        try:
            whole = self.resolved(chunks)
        except ScheduleError:  # it is defined for the Pipe's own number, or the Pipe would not be
            if chunks >= pipe_chunks:
                raise
            whole = self.resolved(pipe_chunks)
        if whole.chunks == chunks:
            return whole
        if whole.chunks < chunks:
            raise ScheduleError(
                f"the schedule is made for {whole.chunks} chunks but this mini-batch gives {chunks} "
                f"(chunks={pipe_chunks}). Give a schedule by name, which fits any number, or set pipe.chunks."
            )
        self._say_once(
            f"schedule {whole.name} is made for {whole.chunks} chunks but this mini-batch gives {chunks}, so its order "
            f"for the first {chunks} runs. Every shorter mini-batch is treated so, without a further warning."
        )
        return whole.first(chunks)

    def _say_once(self, message: str) -> None:
        if not self._has_said and (self._ranks is None or self._ranks[1] == 0):
            warnings.warn(message, UserWarning, stacklevel=2)
        self._has_said = True

    def resolved(self, chunks: int) -> Schedule:
        """The same, without a check of the number of chunks that a given Schedule is made for."""
        stages = len(self._places)
        if self._ranks is None:
            return self.given if isinstance(self.given, Schedule) else schedule_named(self.given, stages, chunks)
        if isinstance(self.given, Schedule):
            return on_ranks(self.given, self._ranks[0])
        return schedule_over(self.given, stages, chunks, self._ranks[0])

    def plan(self, chunks: int, planner: Planner, pipe_chunks: int) -> CallPlan:
        """The plan of a call of so many chunks; `planner` makes it, see execution/plan.py."""
        key = (chunks, planner)
        if key not in self._plans:
            self._plans[key] = planner(self.schedule(chunks, pipe_chunks), self._places, self._here)
        return self._plans[key]

    def uncut(self, schedule: Schedule) -> CallPlan:
        """The plan of a forward of one chunk, by stages that are placed as in a schedule."""
        return plan_forward(schedule.first(1), self._places, self._here)
