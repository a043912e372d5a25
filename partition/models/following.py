"""The copies of a model's modules in its outline follow what is set on the modules: buffers, numbers and words.

    model.rotary --load_state_dict--> writes the buffers, which a copy shares
    model.rotary.scale = 2.0          a copy gets it before the next call; and a buffer that another one has replaced
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from partition.models.stand_ins import Volatile
from partition.names import plain_of


class Following:
    """Copies, and the modules that they follow and do not keep alive. A copy of it follows nothing.

    Args:
        pairs: modules and their copies.
        volatile: what a forward sets or writes, which each copy has for itself.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]] = (), volatile: Volatile | None = None) -> None:
        self._pairs = [_Pair(module, copy, volatile or {}) for module, copy in pairs]
        self._written = self._versions()

    def __reduce__(self) -> tuple[type[Following], tuple[()]]:
        return Following, ()

    def follow(self) -> bool:
        """Give the copies what the modules have now. Returns whether that is something else."""
        changed = [pair.follow() for pair in self._pairs]
        before, self._written = self._written, self._versions()
        return any(changed) or before != self._written

    def _versions(self) -> list[int]:
        """The versions of the buffers, as far as torch counts."""
        buffers = [buffer for pair in self._pairs for buffer in pair.buffers]
        return [each._version for each in buffers if not each.is_inference()]


class _Pair:
    """A module and its copy."""

    def __init__(self, module: nn.Module, copy: nn.Module, volatile: Volatile) -> None:
        self._module = weakref.ref(module)
        self._copy = copy
        self._own = frozenset([name for key, name in volatile if key == id(module)])
        self._shared = [name for name, own in module._buffers.items() if own is not None and copy._buffers[name] is own]
        self._count = 0
        self._settings: Sequence[str] = ()

    @property
    def buffers(self) -> list[Tensor]:
        """Those that both have."""
        table: Any = self._copy._buffers
        return [table[name] for name in self._shared]

    def follow(self) -> bool:
        module = self._module()
        if module is None:
            return False
        here, there = vars(self._copy), vars(module)
        if len(there) != self._count:  # names have come or gone
            self._count = len(there)
            self._settings = [name for name in plain_of(module) if name not in self._own]
        return _copied(self._settings, here, there) | _copied(self._shared, self._copy._buffers, module._buffers)


def _copied(names: Iterable[str], here: dict[str, Any], there: dict[str, Any]) -> bool:
    """Give one table the entries of another. Returns whether it had others."""
    new = {name: there[name] for name in names if name in there and there[name] is not here.get(name)}
    here.update(new)
    return bool(new)
