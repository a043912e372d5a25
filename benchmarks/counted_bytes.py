"""How many bytes are held at the most while something is computed?

    saved   with saving(Bytes(aside)): ...     what autograd's nodes hold
    alive   with Living(Bytes(aside)): ...     all storages that operators have made and that are not freed yet

Each storage counts once, for as long as its holder lives. In the thread that counts, and in no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Bytes:
    """Bytes of storages that are held now, and the most so far; each storage once, some not at all."""

    def __init__(self, aside: Iterable[Tensor]) -> None:
        self._aside = {tensor.untyped_storage().data_ptr() for tensor in aside}
        self._held: dict[int, int] = {}  # address -> how many hold it
        self.now = self.peak = 0

    def hold(self, tensor: Tensor, holder: Any) -> None:
        """Count the storage of a tensor for as long as `holder` lives."""
        storage = tensor.untyped_storage()
        try:
            address, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # of a fake or meta tensor: it has no memory
            return
        if size == 0 or address in self._aside:
            return
        held = self._held.get(address, 0)
        self._held[address] = held + 1
        if not held:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(holder, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]
            self.now -= size


class Held:
    """What stands in autograd's graph for a saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def saving(count: Bytes) -> AbstractContextManager[object]:
    """Within, what autograd saves is counted."""

    def pack(tensor: Tensor) -> Held:
        held = Held(tensor)
        count.hold(tensor, held)
        return held

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)


class Living(TorchDispatchMode):
    """Within, the storages that operators make are counted."""

    def __init__(self, count: Bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not tensor._is_zerotensor():  # torch.func's, which have no memory
                self._count.hold(tensor, tensor.untyped_storage())
        return out
