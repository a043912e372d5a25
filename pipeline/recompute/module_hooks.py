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
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

from torch import nn

HookTable: TypeAlias = dict[int, Any]  # by the ids of their handles
HookEntries: TypeAlias = dict[int, HookTable]  # of the tables that have entries, by their number

_TABLES = itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class ModuleHooks:
    """The tables of hooks of some modules in one call.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.resume()

    def resume(self) -> None:
        """Begin a backward: the caller may have given a module another table (`module._forward_hooks = {}`)."""
        self._tables: list[HookTable] = list(chain.from_iterable(map(_TABLES, map(vars, self._modules))))

    def present(self) -> HookEntries:
        """Their entries, as they are now."""
        if not any(self._tables):  # as a rule: 0.1 us a module
            return {}
        return {number: dict(table) for number, table in enumerate(self._tables) if table}

    def as_before(self, before: HookEntries) -> AbstractContextManager[None] | None:
        """Within: the hooks are those with which a forward began. None: so they are already."""
        present = self.present()
        return None if present == before else self._swapped(before, present)

    @contextmanager
    def _swapped(self, before: HookEntries, present: HookEntries) -> Iterator[None]:
        self.put_back(before)
        try:
            yield
        finally:
            self.put_back(present)

    def put_back(self, entries: HookEntries) -> None:
        """Restore earlier entries."""
        for number, table in enumerate(self._tables):
            wanted = entries.get(number, {})
            if table != wanted:
                table.clear()
                table.update(wanted)
