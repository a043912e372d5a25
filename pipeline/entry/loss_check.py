"""The check that the losses of the chunks combine to the loss of the mini-batch.

    outputs of all chunks --join--> loss_fn --> the same value, and the same gradient at the output?

The gradient too: the values of a surrogate (a policy gradient, loss / loss.detach()) may agree by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeline.common.graph import gradients
from pipeline.common.torch_modes import without_autocast
from pipeline.data.loss import Loss
from pipeline.data.microbatch import Batch, gather
from pipeline.data.pytrees import Activations, Grads, Tree


def check_joined(
    loss: Loss,
    target: Batch,
    outputs: Sequence[Activations],
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
    whole_target = target.tree.build(target.tree.tensors)
    leaves = [_leaves(message) for message in outputs]
    with torch.set_grad_enabled(needs_grad):
        trees = [Tree(own, message.tree.skeleton) for own, message in zip(leaves, outputs, strict=True)]
        joined, _ = gather(trees, target.rows, target.batch_dim)
        device = joined.tensors[0].device if joined.tensors else None
        whole = loss.check(joined.build(joined.tensors), _moved(whole_target, device))
    if not whole.requires_grad:
        return
    wanted = [leaf for own in leaves for leaf in own if leaf.requires_grad]
    with without_autocast():
        found = iter(gradients([whole], wanted, [torch.ones_like(whole)], retain=True) if wanted else ())
    expected = [tuple([next(found) if leaf.requires_grad else None for leaf in own]) for own in leaves]
    for index in range(len(joined.tensors)):
        pairs = [
            _pair(own[index], grads.get(chunk, (None,) * (index + 1))[index], expected[chunk][index], scale)
            for chunk, own in enumerate(leaves)
            if own[index].requires_grad  # of a chunk that needs none there is none to compare
        ]
        # An overflow is the scaler's affair.
        if scale is None or all([torch.isfinite(ours).all() for ours, _ in pairs]):
            loss.check_grads(pairs)


def _leaves(message: Activations) -> tuple[Tensor, ...]:
    given = zip(message.tree.tensors, message.needs_grad, strict=True)
    return tuple([tensor.detach().requires_grad_(need) for tensor, need in given])


def _pair(leaf: Tensor, ours: Tensor | None, expected: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """The chunk's own gradient of an output, unscaled, and that of the whole."""
    own = torch.zeros_like(leaf, requires_grad=False) if ours is None else ours if scale is None else ours / scale
    return own, torch.zeros_like(own) if expected is None else expected


def _moved(value: Any, device: torch.device | None) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value) if device else value
