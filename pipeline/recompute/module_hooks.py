"""The hooks of a stage's modules in one call: a recomputation runs under those with which its forward began.

    F(i) begins   each module's tables of hooks: kept for R(i), where they have entries
    later         a hook removes itself, the caller removes some or registers others
    R(i)          the tables have the entries with which F(i) began; at the end those with which they were found

Entries change within the same tables, so handles stay valid. Backward hooks are among them: a module puts them into the
graph as it computes. Hooks of all modules (`register_module_forward_hook`) are switches of torch: see torch_modes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, compress
from operator import itemgetter
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

HookTable: TypeAlias = dict[int, Any]  # by the ids of their handles
HookEntries: TypeAlias = dict[int, tuple[HookTable, ...]]  # of the modules with hooks, by their number

_HOOKS = itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_NONE: HookTable = {}
_NO_HOOKS = (_NONE,) * 7


class ModuleHooks:
    """The tables of hooks of some modules in one call: at its beginning, and before each chunk.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.resume()
        self._first = self._present()
        self._before: dict[int, HookEntries] = {}

    def resume(self) -> None:
        """Begin a backward: the caller may have given a module another table (`module._forward_hooks = {}`)."""
        self._all: list[HookTable] = list(chain.from_iterable(map(_HOOKS, map(vars, self._modules))))

    def _present(self) -> HookEntries:
        if not any(self._all):  # as a rule: 0.1 us a module
            return {}
        hooked = {number // 4: None for number in compress(range(len(self._all)), self._all)}
        return {
            number: tuple([dict(table) if table else _NONE for table in self._tables(number)]) for number in hooked
        }

    def _tables(self, number: int) -> tuple[HookTable, ...]:
        tables: tuple[HookTable, ...] = _TABLES(vars(self._modules[number]))
        return tables

    def before_forward(self, chunk: int) -> None:
        """Keep the hooks with which F of `chunk` begins."""
        self._before[chunk] = self._present()

    def as_before(self, chunk: int) -> AbstractContextManager[None] | None:
        """Within: the hooks are those with which F of `chunk`, or the call, began. None: so they are already."""
        before, present = self._before.get(chunk, self._first), self._present()
        return None if present == before else self._swapped(before, present)

    @contextmanager
    def _swapped(self, before: HookEntries, present: HookEntries) -> Iterator[None]:
        self._write(_without_spent(before, present))
        try:
            yield
        finally:
            self._write(present)

    def _write(self, entries: HookEntries) -> None:
        for number in {**entries, **self._present()}:
            for table, wanted in zip(self._tables(number), entries.get(number, _NO_HOOKS), strict=True):
                if table != wanted:
                    table.clear()
                    table.update(wanted)

    def put_back(self, chunk: int) -> None:
        """Restore those with which F of `chunk` began."""
        if chunk in self._before:
            self._write(self._before[chunk])

    def roll_back(self) -> None:
        """Restore those from the beginning of the call."""
        self._write(self._first)

    def forget(self, chunk: int) -> None:
        """Drop what is kept for a chunk."""
        self._before.pop(chunk, None)

    def clear(self) -> None:
        """Drop what is kept for all chunks."""
        self._before.clear()


def _without_spent(before: HookEntries, present: HookEntries) -> HookEntries:
    """The entries without hooks that have given a lazy module its shapes, and its class: they cannot do so twice."""
    return {
        number: tuple([
            {key: hook for key, hook in table.items() if key in now or not _initializes(hook)}
            for table, now in zip(tables, present.get(number, _NO_HOOKS), strict=True)
        ])
        for number, tables in before.items()
    }


def _initializes(hook: Any) -> bool:
    return getattr(hook, "__func__", None) is LazyModuleMixin._infer_parameters
