"""Many small tensors kept as a few flat ones, at little cost.

    tensors --flatten, by dtype and device--> a few flat tensors --copies--> tensors with the same values again

A network with a hundred batch norms has three hundred buffers, and each chunk may need their values from before it.
Tensors that share memory, or are not contiguous, are cloned by themselves: copies share memory among themselves as the
originals do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.data.pytrees import storage_of


class Snapshot:
    """The values of some tensors at one moment."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._flat: list[tuple[list[int], Tensor, list[Tensor]]] = []  # places, values, tensors of the same shapes
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        apart: list[int] = []
        sharing = Counter(map(storage_of, tensors))
        for index, tensor in enumerate(tensors):
            alone = sharing[storage_of(tensor)] == 1 and tensor.layout is torch.strided and tensor.is_contiguous()
            (groups.setdefault((tensor.dtype, tensor.device), []) if alone else apart).append(index)
        with torch.no_grad():
            for places in groups.values():
                own = [tensors[place].detach() for place in places]
                flat = torch._C._nn.flatten_dense_tensors(own)
                self._flat.append((places, flat.clone() if len(own) == 1 else flat, own))  # else it is a view
        self._apart = apart
        self._clones = _clones([tensors[place] for place in apart])

    def copies(self) -> list[Tensor]:
        """Tensors of these values, which may be written."""
        return self._given([flat.clone() for _, flat, _ in self._flat], _clones(self._clones))

    def values(self) -> list[Tensor]:
        """Tensors of these values, which must not be written."""
        return self._given([flat for _, flat, _ in self._flat], self._clones)

    def _given(self, flats: list[Tensor], clones: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = [torch.empty(0, device="cpu")] * self._count
        for (places, _, like), flat in zip(self._flat, flats, strict=True):
            for place, view in zip(places, torch._C._nn.unflatten_dense_tensors(flat, like), strict=True):
                found[place] = view.data  # with a version counter of its own
        for place, clone in zip(self._apart, clones, strict=True):
            found[place] = clone
        return found


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Detached copies that share memory among themselves as the originals do."""
    sharing = Counter(storage_of(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())
    bases: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        place = storage_of(tensor)
        if id(tensor) in copies:
            continue
        if sharing[place] == 1:
            copies[id(tensor)] = tensor.detach().clone()
        else:
            base = bases.setdefault(place, tensor.untyped_storage().clone())
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies[id(tensor)] = empty.set_(base, tensor.storage_offset(), tensor.shape, tensor.stride())
    return [copies[id(tensor)] for tensor in tensors]
