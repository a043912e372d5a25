"""The copies of a model's modules, in its outline and its parts, follow what is set on these: attributes, buffers.

    model.rotary --load_state_dict--> writes the buffers, which a copy shares
    model.rotary.scale = 2.0          a copy gets it before the next call; and a buffer that another one has replaced
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from partition.models.references import is_setting, plain_attributes
from partition.models.stand_ins import VolatileAttributes


class ModuleCopies:
    """Copies, and the modules that they follow and do not keep alive. A copy of it follows nothing.

    Args:
        pairs: modules and their copies.
        volatile: what a forward sets or writes, which each copy has for itself.
    """

    def __init__(
        self, pairs: Iterable[tuple[nn.Module, nn.Module]] = (), volatile: VolatileAttributes | None = None
    ) -> None:
        self._volatile = volatile or {}
        self._copies = [_ModuleCopy(module, copy, self._volatile) for module, copy in pairs]
        self._written = self._versions()

    def add(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Let other copies follow, too."""
        self._copies += [_ModuleCopy(module, copy, self._volatile) for module, copy in pairs]

    def __reduce__(self) -> tuple[type[ModuleCopies], tuple[()]]:
        return ModuleCopies, ()

    def follow(self) -> bool:
        """Give the copies what the modules have now. Returns whether that is something else."""
        changed = [copy.follow() for copy in self._copies]
        before, self._written = self._written, self._versions()
        return any(changed) or before != self._written

    def _versions(self) -> list[int]:
        """The versions of the buffers, as far as torch counts."""
        buffers = [buffer for copy in self._copies for buffer in copy.buffers]
        return [buffer._version for buffer in buffers if not buffer.is_inference()]


class _ModuleCopy:
    """A module and its copy, which gets what is set on the module, and keeps what is set on itself."""

    def __init__(self, module: nn.Module, copy: nn.Module, volatile: VolatileAttributes) -> None:
        self._module = weakref.ref(module)
        self._copy = copy
        self._volatile = frozenset([name for key, name in volatile if key == id(module)])
        self._shared = [  # None as well, in the place of which a buffer may be set
            name for name, buffer in module._buffers.items()
            if name not in self._volatile and copy._buffers[name] is buffer
        ]  # fmt: skip
        self._count = 0
        self._settings: Sequence[str] = ()
        self._seen = {**plain_attributes(module), **module._buffers}

    @property
    def buffers(self) -> list[Tensor]:
        """Those that both have."""
        table: Any = self._copy._buffers
        return [table[name] for name in self._shared if table[name] is not None]

    def follow(self) -> bool:
        module = self._module()
        if module is None:
            return False
        copied, original = vars(self._copy), vars(module)
        if len(original) != self._count:  # names have come or gone
            self._count = len(original)
            self._settings = [name for name in plain_attributes(module) if name not in self._volatile]
        buffers: Any = module._buffers
        return self._follow(self._settings, copied, original) | self._follow(self._shared, self._copy._buffers, buffers)

    def _follow(self, names: Iterable[str], target: dict[str, Any], source: dict[str, Any]) -> bool:
        """Give one table the entries of another that are new there. Returns whether there are any."""
        changed = {
            name: source[name] for name in names
            if name in source and source[name] is not self._seen.get(name, self) and is_setting(source[name])
        }  # fmt: skip
        self._seen.update(changed)
        target.update((name, _on_its_device(value, target.get(name))) for name, value in changed.items())
        return bool(changed)


def _on_its_device(value: Any, earlier: Any) -> Any:
    """A value, where another is: a part may lie on another device."""
    return value.to(earlier.device) if isinstance(value, Tensor) and isinstance(earlier, Tensor) else value
