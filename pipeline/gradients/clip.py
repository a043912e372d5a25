"""The clip by a norm over all gradients, as torch.nn.utils.clip_grad_norm_ computes it.

    gradients --norm_of--> norms --joined_norm--> total --clip_factor--> what each gradient is multiplied by

Steps, GradStores and EagerUpdates clip by these, in one process and over ranks: they agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def stored_entries(grad: Tensor) -> Tensor:
    """The entries of a gradient; of a sparse one those that are stored."""
    return grad.coalesce().values() if grad.is_sparse else grad


def norm_of(grad: Tensor, norm_type: float = 2.0) -> Tensor:
    """The norm of one gradient."""
    norm: Tensor = torch.linalg.vector_norm(stored_entries(grad), norm_type)
    return norm


def joined_norm(norms: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, from the norm of each: on the device of the first."""
    if not norms:
        return torch.zeros((), device="cpu")
    groups = _group_tensors_by_device_and_dtype([list(norms)])  # torch adds up device by device, type by type
    ordered = [norm.to(norms[0].device) for (group,), _ in groups.values() for norm in group if norm is not None]
    total: Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    return total


def norms_as_numbers(norms: Sequence[Tensor]) -> list[float]:
    """The norms as numbers. The host waits once for those of one device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, norm in enumerate(norms):
        groups.setdefault((norm.device, norm.dtype), []).append(index)
    values = [0.0] * len(norms)
    for indices in groups.values():
        for index, value in zip(indices, torch.stack([norms[index] for index in indices]).tolist(), strict=True):
            values[index] = value
    return values


def total_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The same from the gradients."""
    return torch.nn.utils.get_total_norm([stored_entries(grad) for grad in grads], norm_type)


def clip_factor(max_norm: float, total: Tensor) -> Tensor:
    """The factor with which gradients of a norm have one of at most `max_norm`. No norm is above inf: 1."""
    if max_norm == inf:
        return torch.ones_like(total)
    return torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
