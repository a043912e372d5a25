"""Tensors without memory (on the meta device): a survey, their allocation, and marks of those not yet written.

    layers --meta_tensors_of--> MetaTensor, by id   on the meta device: a shape and a type, at one place or several
                          |
                       give_memory             the same object, now with memory on its device, marked
                          |
                       is_marked           after an initialisation: not written yet
                          |
                       emptied_again       after an error, on any rank: on the meta device, as before

Everything that a layer keeps in its parameters and buffers is found by `PlacedLayer.places`. Tensors on the meta device
anywhere else in a layer are refused by `check_reachable`: nothing could give them values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partition.names import sequential


class PlacedLayer(NamedTuple):
    """A layer of a model.

    Attributes:
        number: in the nn.Sequential, from 0.
        name: there.
        module: the layer.
        device: on which it is to be.
    """

    number: int
    name: str
    module: nn.Module
    device: torch.device

    @property
    def alone(self) -> nn.Sequential:
        """A Sequential of this layer alone, under its name."""
        return sequential({self.name: self.module})

    def places(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, whether a state_dict has it) of every place where it has a parameter or buffer."""
        for prefix, module in self.alone.named_modules(remove_duplicate=False):
            tables: tuple[Mapping[str, Tensor | None], ...] = (module._parameters, module._buffers)
            for key, tensor in [item for table in tables for item in table.items()]:
                if tensor is not None:
                    yield f"{prefix}.{key}".removeprefix("."), tensor, key not in module._non_persistent_buffers_set


@dataclass(eq=False)
class MetaTensor:
    """A parameter or buffer without memory.

    Attributes:
        tensor: the object, which stays the same.
        layer: the first that has it, on whose device its memory will be.
        names: of all its places.
        saved: whether a state_dict has it: not a buffer with persistent=False.
        version: of the tensor, before anyone has filled it.
    """

    tensor: Tensor
    layer: PlacedLayer
    names: list[str] = field(default_factory=list)
    saved: bool = False
    version: int = 0


def meta_tensors_of(layers: Iterable[PlacedLayer]) -> dict[int, MetaTensor]:
    """The tensors without memory, by id, in the order of their first places.

    Raises:
        ValueError: one is no plain tensor.
    """
    by_id: dict[int, MetaTensor] = {}
    for layer in layers:
        for place, tensor, saved in layer.places():
            if tensor.is_meta:
                _check_plain(place, tensor)
                empty = by_id.setdefault(id(tensor), MetaTensor(tensor, layer))
                empty.names.append(place)
                empty.saved = empty.saved or saved
    return by_id


def _check_plain(name: str, tensor: Tensor) -> None:
    overrides_dispatch = type(tensor).__torch_dispatch__ not in (
        Tensor.__torch_dispatch__, nn.Parameter.__torch_dispatch__
    )
    if overrides_dispatch or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name!r} is on the meta device and no plain tensor ({type(tensor).__name__}, {tensor.layout}), so it "
            "cannot be given memory. Build its layer on a real device."
        )


def check_reachable(layers: Iterable[PlacedLayer], empty: Mapping[int, MetaTensor]) -> None:
    """Refuse tensors without memory that are neither parameters nor buffers: nothing could give them values."""
    stray = []
    for layer in layers:
        for prefix, module in layer.alone.named_modules():
            for key, value in vars(module).items():
                leaves = tree_leaves(value) if isinstance(value, Tensor | list | tuple | dict) else ()
                if any(isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in empty for leaf in leaves):
                    stray.append(f"{prefix}.{key}".removeprefix("."))
    if stray:
        raise ValueError(
            f"attributes that hold tensors on the meta device and are no parameters or buffers: {stray}. Register them "
            "(register_buffer(name, tensor, persistent=False)), or build their layers on a real device."
        )


def give_memory(empty: Iterable[MetaTensor], marked: bool) -> None:
    """Give tensors memory, in the same objects. Those that shared some share it again, with their offsets and strides.

    Args:
        empty: the tensors.
        marked: whether to mark them, so that `is_marked` tells whether they were filled.
    """
    storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # the old one, kept, and the new one
    for meta in empty:
        old, device = meta.tensor.untyped_storage(), meta.layer.device
        if old._cdata not in storages:  # an address, which stays the old one's
            storages[old._cdata] = old, torch.UntypedStorage(old.nbytes(), device=device)
        _, new = storages[old._cdata]
        view = (meta.tensor.storage_offset(), meta.tensor.size(), meta.tensor.stride())
        real = torch.empty(0, dtype=meta.tensor.dtype, device=device).set_(new, *view)
        if marked:
            _mark(torch.empty(0, dtype=real.dtype, device=real.device).set_(new))
        become(meta.tensor, real)
        meta.version = meta.tensor._version


def become(tensor: Tensor, real: Tensor) -> None:
    """Replace a tensor's contents while it stays the same object: its type, attributes and hooks are kept.

    torch.utils.swap_tensors ends in the same call. That one exchanges types and attributes too, and refuses tensors
    with weak references, as nn.LSTM has.
    """
    real.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, real)
    hooked: Any = tensor
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # setting them registers them with what it is now
        if getattr(hooked, hooks):
            setattr(hooked, hooks, getattr(hooked, hooks))


@contextmanager
def emptied_again(module: nn.Module) -> Iterator[None]:
    """Within: an error takes the memory of tensors that were on the meta device, so that another try fills them all."""
    before = [(tensor, tensor.detach()) for tensor in chain(module.parameters(), module.buffers()) if tensor.is_meta]
    try:
        yield
    except BaseException:
        for tensor, empty in before:
            if not tensor.is_meta:
                become(tensor, empty)
        raise


def _mark(tensor: Tensor) -> None:
    """Mark a tensor with values that no initialisation leaves: nan, or the highest integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def is_marked(empty: MetaTensor) -> bool:
    """Whether a tensor, or part of it, is as `_mark` left it."""
    tensor = empty.tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        return bool((tensor != tensor).any())
    if empty.tensor._version != empty.version or not tensor.numel():
        return False
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).all())
