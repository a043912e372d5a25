"""Do the losses of the chunks combine to the loss of the mini-batch?

    outputs of all chunks --join--> loss_fn --> the same value, and the same gradient at the output?

The gradient too: the values of a surrogate (a policy gradient, loss / loss.detach()) may agree by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeline.ambient import without_autocast, without_function_modes
from pipeline.graph import gradients
from pipeline.loss import Loss
from pipeline.microbatch import Batch, gather
from pipeline.trees import Grads, Message


def check_joined(
    loss: Loss,
    target: Batch,
    outputs: Sequence[Message],
    grads: Mapping[int, Grads],
    needs_grad: bool,
    scale: float | None,
) -> None:
    """Compare with loss_fn on the whole.

    Args:
        loss: has seen all chunks.
        target: of the mini-batch.
        outputs: of the chunks, detached.
        grads: by chunk, at its outputs.
        needs_grad: whether to compare gradients.
        scale: of a GradScaler: what `grads` are multiplied by, and may have overflowed with. None: there is none.

    Raises:
        ValueError: they disagree, so loss_fn is neither a mean nor a sum over rows.
    """
    joined, _ = gather([message.tree for message in outputs], target.rows)
    whole_target = target.tree.build(target.tree.tensors)
    device = joined.tensors[0].device if joined.tensors else None
    columns = zip(*(message.needs_grad for message in outputs), strict=True)
    leaves = [tensor.detach().requires_grad_(any(need)) for tensor, need in zip(joined.tensors, columns, strict=True)]
    with torch.set_grad_enabled(needs_grad):
        whole = loss.check(joined.build(leaves), _moved(whole_target, device))
    wanted = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    if not wanted or not whole.requires_grad:
        return
    with without_autocast():
        found = gradients([whole], [leaves[index] for index in wanted], [torch.ones_like(whole)], retain=True)
    for index, expected in zip(wanted, found, strict=True):
        ours = _joined_grad(index, outputs, grads)
        ours = ours if scale is None else ours / scale
        if scale is None or torch.isfinite(ours).all():  # an overflow is the scaler's affair
            loss.check_grad(ours, torch.zeros_like(ours) if expected is None else expected)


def _joined_grad(index: int, outputs: Sequence[Message], grads: Mapping[int, Grads]) -> Tensor:
    pieces = []
    for chunk, message in enumerate(outputs):
        grad = grads.get(chunk, (None,) * (index + 1))[index]
        pieces.append(torch.zeros_like(message.tree.tensors[index]) if grad is None else grad)
    with without_function_modes():
        return torch.cat(pieces)


def _moved(value: Any, device: torch.device | None) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value) if device else value
