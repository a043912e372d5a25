"""A twin of a model on the meta device: the same modules with made-up numbers, on which the model is cut.

    model, without numbers --twin_of--> Twin.model --cut, compared on the sample--> layers of the twin's modules
                                                                                           |
                                            layers of the model's own modules <---Twin.returned

What two parts compute alike with numbers that are all different they compute alike with a checkpoint's. Matrices share
memory: each is a window of one random tensor, a little further than the one before. So a twin takes the memory of the
largest matrix, of all vectors, and of the activations of the sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from math import log2
from typing import Any

import torch
from torch import Tensor, nn

from partition.contents import tensors_in, with_attributes
from partition.errors import PartitionError
from partition.models.shapes import MadeUpBuffer

_STEP = 16  # numbers between the windows of two matrices
_PIECE = 2**20  # numbers that are drawn at a time


class Twin:
    """A model that can be run, in the place of one without numbers.

    Args:
        model: with parameters or buffers on the meta device.
        device: where the numbers are.

    Attributes:
        model: the twin of the model. What has numbers is the model's own.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        originals = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self._numbers = _numbers([tensor for tensor in originals.values() if tensor.is_meta], device)
        made_up = {key: _like(originals[key], number) for key, number in self._numbers.items()}
        self.model = copy.deepcopy(model, {**originals, **made_up})
        modules = zip(self.model.modules(), model.modules(), strict=True)
        self._returned: dict[int, Any] = {id(module): original for module, original in modules}
        self._returned.update({id(tensor): originals[key] for key, tensor in {**originals, **made_up}.items()})

    def returned(self, layers: nn.Sequential) -> nn.Sequential:
        """Layers of the twin's modules with those of the model in their places. The numbers are no more."""
        with torch.no_grad():
            for number in self._numbers.values():
                if number.is_floating_point() or number.is_complex():
                    number.fill_(float("nan"))  # if anything still computes with them, it shows
        return copy.deepcopy(layers, dict(self._returned))


def twin_of(model: nn.Module, sample: Any) -> Twin | None:
    """The twin of a model with parameters or buffers on the meta device; None where all have numbers.

    Raises:
        PartitionError: buffers that no state_dict has are there, or the sample is.
    """
    if not any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
        return None
    unsaved = [
        f"{name}.{key}" if name else key for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and key in module._non_persistent_buffers_set
    ]  # fmt: skip
    if unsaved:
        more = f" and {len(unsaved) - 5} more" if len(unsaved) > 5 else ""
        raise PartitionError(
            f"on the meta device, so without numbers, are buffers that no state_dict has: {', '.join(unsaved[:5])}"
            f"{more}. Build the model under pipeline.meta_parameters(), where they get theirs."
        )
    tensors = tensors_in(sample)
    if any(leaf.is_meta for leaf in tensors):
        raise PartitionError("the sample is on the meta device: the model is run on it, and needs its numbers.")
    return Twin(model, tensors[0].device if tensors else torch.device("cpu"))


def _like(tensor: Tensor, number: Tensor) -> Tensor:
    """A number in the place of a parameter, or of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return with_attributes(nn.Parameter(number, tensor.requires_grad), tensor)
    return with_attributes(number.as_subclass(MadeUpBuffer), tensor)


def _numbers(tensors: Iterable[Tensor], device: torch.device) -> dict[int, Tensor]:
    """Numbers of the shapes and types of some tensors, by the id of each; always the same.

    Those of matrices have a size that keeps what goes through them as large as it is; those of others are about 1.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    numbers: dict[int, Tensor] = {}
    windows: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for tensor in tensors:
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if is_number and tensor.dim() > 1 and tensor.numel():
            exponent = round(log2(tensor.numel() / max(tensor.shape)) / 2)
            windows.setdefault((tensor.dtype, exponent), []).append(tensor)
        else:
            values = torch.rand(tensor.shape, generator=generator, device="cpu") + 0.5
            numbers[id(tensor)] = (values if is_number else torch.ones_like(values)).to(device, tensor.dtype)
    for (dtype, exponent), same_size in windows.items():
        size = max(tensor.numel() for tensor in same_size) + _STEP * len(same_size)
        memory = torch.empty(size, dtype=dtype, device=device)
        for piece in memory.split(_PIECE):
            piece.copy_(torch.randn(len(piece), generator=generator, device="cpu") / 2**exponent)
        for place, tensor in enumerate(same_size):
            window = memory[_STEP * place :][: tensor.numel()].view(tensor.shape)
            numbers[id(tensor)] = torch.from_dlpack(window)  # a storage of its own: by these, tensors are told apart
    return numbers
