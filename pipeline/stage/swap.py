"""Other tensors in the places of a stage's parameters, while it computes.

    module._parameters["weight"]:  parameter  --enter--> alias, view, dual tensor  --exit--> parameter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.common.module_tables import ModuleTable

_FLATTEN = "flatten_parameters"


class ParameterTables(NamedTuple):
    """The modules' tables of parameters, and what they hold while others stand in for these."""

    tables: Sequence[ModuleTable]
    stand_ins: Sequence[ModuleTable]
    values: Sequence[Tensor | None]  # of all `stand_ins`
    rnns: Sequence[dict[str, Any]]  # the attributes of modules of the stage that are torch's RNNs

    @classmethod
    def of(cls, pairs: Sequence[tuple[ModuleTable, ModuleTable]], rnns: Sequence[dict[str, Any]]) -> ParameterTables:
        stand_ins = [table for _, table in pairs]
        values = [value for table in stand_ins for value in table.values()]
        return cls([table for table, _ in pairs], stand_ins, values, rnns)


class Swap:
    """Within: other tensors stand in the modules' tables. At the end: those from before, and those that were added.

    What the user has taken out of a table since the stand-ins were made, as by pruning, stays out of it.

    Torch's RNNs list their parameters a second time. For cuDNN a forward that finds others moves them into one piece of
    memory, in which no stand-in would be one. The parameters themselves lie in one piece since they came to the device.

    Args:
        tables: the tables, and the tensors that each holds within.
        changed: makes the error of a table in which one of these was replaced.
    """

    __slots__ = ("_tables", "_changed", "_previous", "_flattens")

    def __init__(self, tables: ParameterTables, changed: Callable[[ModuleTable, ModuleTable], RuntimeError]) -> None:
        self._tables = tables
        self._changed = changed
        self._previous: list[ModuleTable] = []
        self._flattens: list[Any] = []

    def __enter__(self) -> None:
        self._previous = [table.copy() for table in self._tables.tables]
        self._flattens = [attributes.get(_FLATTEN) for attributes in self._tables.rnns]
        for table, stand_ins in zip(self._tables.tables, self._tables.stand_ins):
            table.update(stand_ins)
        for attributes in self._tables.rnns:
            attributes[_FLATTEN] = _nothing

    def __exit__(self, kind: object, *exc: object) -> None:
        tables, stand_ins, values, rnns = self._tables
        present = [*chain.from_iterable([table.values() for table in tables])]
        is_same = len(present) == len(values) == sum(map(len, self._previous)) and all(map(is_, present, values))
        error = None if is_same else self._error()
        for table, previous in zip(tables, self._previous):
            table.update(previous)
        if not is_same:
            for table, in_use, previous in zip(tables, stand_ins, self._previous):
                for name in in_use.keys() - previous.keys():
                    table.pop(name, None)
        for attributes, flatten in zip(rnns, self._flattens):
            del attributes[_FLATTEN]
            if flatten is not None:
                attributes[_FLATTEN] = flatten
        if error is not None and kind is None:
            raise error

    def _error(self) -> RuntimeError | None:
        """The error where a stand-in was replaced. None: others were added."""
        for table, stand_ins, previous in zip(self._tables.tables, self._tables.stand_ins, self._previous):
            before = {**previous, **stand_ins}
            if any([table.get(name, table) is not tensor for name, tensor in before.items()]):
                return self._changed(table, before)
        return None


def _nothing() -> None:
    pass
