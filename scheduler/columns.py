"""The actions of a schedule as columns of whole numbers, for passes over many at once.

    orders  -->  first[lane]                    where in the columns each lane begins; one more: where the last ends
                 lane, stage, kind, chunk       one entry for each action, lane after lane; kind counts F B I W from 0
                 exists                         whether there is such a stage and chunk
                 split[stage, chunk]            whether that backward is I and W

    code = (stage * 4 + kind) * chunks + chunk  is the number of an action that exists
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy
from numpy.typing import NDArray

from scheduler.action import COMPUTE, Action, Kind
from scheduler.errors import ScheduleError, whole
from scheduler.faults import Fault
from scheduler.schedule import Schedule

Numbers = NDArray[numpy.int64]
Booleans = NDArray[numpy.bool_]

KINDS = len(COMPUTE)


@dataclass(frozen=True)
class Columns:
    """The actions of `schedule`, one column for each thing that they say.

    >>> schedule = Schedule.parse('''
    ...     schedule mine, chunks 2, stages on lanes 0 1
    ...     lane 0: 0F0 0F1
    ...     lane 1: 1F0 1I0
    ... ''')
    >>> columns = Columns(schedule)
    >>> columns.first, columns.kind.tolist(), columns.code.tolist()
    ([0, 2, 4], [0, 0, 0, 2], [0, 1, 8, 12])
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        if self.beyond > _MOST:
            raise ScheduleError(
                f"schedule {self.schedule.name} has {self.schedule.chunks} chunks in {self.schedule.stages} stages, "
                f"which is too much to look at. Give at most {_MOST // KINDS // self.schedule.stages} chunks."
            )

    @cached_property
    def first(self) -> list[int]:
        return [0, *accumulate(map(len, self.schedule.orders))]

    @cached_property
    def lane(self) -> Numbers:
        return numpy.repeat(numpy.arange(self.schedule.lanes), [len(order) for order in self.schedule.orders])

    @cached_property
    def stage(self) -> Numbers:
        return self._column(0)

    @cached_property
    def chunk(self) -> Numbers:
        return self._column(2)

    @cached_property
    def kind(self) -> Numbers:
        number = {kind: index for index, kind in enumerate(COMPUTE)}
        return numpy.array([number[action.kind] for action in self.schedule.actions], dtype=numpy.int64)

    @cached_property
    def exists(self) -> Booleans:
        return (
            (self.stage >= 0) & (self.stage < self.schedule.stages)
            & (self.chunk >= 0) & (self.chunk < self.schedule.chunks)
        )

    @property
    def beyond(self) -> int:
        """The number after those of all actions that exist."""
        return self.schedule.stages * KINDS * self.schedule.chunks

    @cached_property
    def code(self) -> Numbers:
        """Of an action that does not exist: `beyond`."""
        code = (self.stage * KINDS + self.kind) * self.schedule.chunks + self.chunk
        return numpy.where(self.exists, code, self.beyond)

    @cached_property
    def split(self) -> Booleans:
        return self.counts[:, COMPUTE.index(Kind.I)] > 0

    @cached_property
    def counts(self) -> Numbers:
        """The number of times that each action runs: counts[stage, kind, chunk]."""
        shape = self.schedule.stages, KINDS, self.schedule.chunks
        return numpy.bincount(self.code, minlength=self.beyond + 1)[:-1].reshape(shape)

    def has(self, action: Action) -> bool:
        """Whether an action that exists runs."""
        return bool(self.counts[action.stage, COMPUTE.index(action.kind), action.chunk])

    def action(self, code: int) -> Action:
        """The action of this code."""
        row, chunk = divmod(code, self.schedule.chunks)
        stage, kind = divmod(row, KINDS)
        return Action(stage, COMPUTE[kind], chunk)

    def foreign(self) -> Iterator[Fault]:
        """A fault for each action of a stage or chunk that does not exist."""
        limits = f"{self.schedule.stages} stages and {self.schedule.chunks} chunks, numbered from 0"
        for index in numpy.flatnonzero(~self.exists):
            lane, position, action = self.place(index)
            yield Fault(f"lane {lane} runs {action}, but there are {limits}: drop it.", lane, position)

    def place(self, index: int | numpy.signedinteger[Any]) -> tuple[int, int, Action]:
        """Lane, position and action of one entry."""
        lane = int(self.lane[index])
        position = int(index) - self.first[lane]
        return lane, position, self.schedule.orders[lane][position]

    def _column(self, field: int) -> Numbers:
        """Whole numbers; -1 in place of what is no number of a stage or chunk."""
        values = [action[field] for action in self.schedule.actions]
        array = numpy.array(values)
        if array.dtype == numpy.int64:
            return array
        return numpy.array([_one(value) for value in values], dtype=numpy.int64)


def _one(value: Any) -> int:
    number = whole(value)
    return number if number is not None and 0 <= number < 2**62 else -1


_MOST = 2**26  # half a gigabyte for each column
