"""The outputs of a chunk as loss_fn gets them: tensors that it may write.

    output, a view, or to stay as it is --LossInputs--> no view, its memory or a copy --> loss_fn
    gradient of the output  <----------------------------------------- the same gradient

A write to a view replaces its history, so that the graph of the loss would lead past the output, at which it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.data.pytrees import copied, memory_address, same_values, versions


class LossInputs:
    """The tensors on which loss_fn computes the loss of a chunk.

    Args:
        outputs: where the loss begins.
        is_copied: whether loss_fn gets copies.
    """

    def __init__(self, outputs: Sequence[Tensor], is_copied: bool) -> None:
        self.tensors = outputs
        self._outputs = outputs
        self._is_copied = is_copied
        if is_copied or any([output._is_view() for output in outputs]):
            values = [copied(output.detach()) if is_copied else output for output in outputs]
            self.tensors = tuple(map(_loss_input, outputs, values))
        self._versions = versions(self.tensors)

    def check_written(self) -> bool:
        """Whether loss_fn has written one of them in place.

        Raises:
            RuntimeError: it has, and two outputs share memory.
        """
        is_written = versions(self.tensors) != self._versions or self._is_copied and self._have_other_values
        if is_written and len(set(map(memory_address, self._outputs))) < len(self._outputs):
            raise RuntimeError(
                "loss_fn writes an output of the last stage in place, and another output shares memory with it: the "
                "plain module would see both written. Write to a copy (x * 2 instead of x.mul_(2)), or return a clone "
                "from the last layer."
            )
        return is_written

    @property
    def _have_other_values(self) -> bool:
        """Whether inference tensors, which count no writes, differ from the outputs of which they are copies."""
        pairs = zip(self.tensors, self._outputs, strict=True)
        return any([copy.is_inference() and not same_values(copy, output) for copy, output in pairs])


class _LossInput(torch.autograd.Function):
    """An output as loss_fn gets it. Its gradient is the output's."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pragma: no cover
        return grad, None


_loss_input: Callable[[Tensor, Tensor], Tensor] = _LossInput.apply
