"""The forms in which a user gives vectors, and gets them.

    {"0.weight": tensor, ...}        by name; over ranks those of this rank
    [{...}, {...}]                   several
    tensor [n]                       all entries, parameter after parameter; in one process
    tensor [n, k]                    k vectors as columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.space import Space, Vec

NamedTensors: TypeAlias = Mapping[str, Tensor]
Vectors: TypeAlias = NamedTensors | Sequence[NamedTensors] | Tensor
ToUserForm: TypeAlias = Callable[[list[Vec]], Any]


def taken(space: Space, vectors: Vectors) -> tuple[list[Vec], ToUserForm]:
    """The vectors, and what puts results into the same form.

    Raises:
        TypeError: another form.
        ValueError: another size; a flat tensor over ranks.
        KeyError: other names.
    """
    if isinstance(vectors, Tensor):
        return _from_flat(space, vectors)
    if isinstance(vectors, Mapping):
        return [space.vec(_checked(vectors))], lambda vecs: space.named(vecs[0])
    if isinstance(vectors, Sequence) and vectors and all(isinstance(named, Mapping) for named in vectors):
        return [space.vec(_checked(named)) for named in vectors], lambda vecs: [space.named(named) for named in vecs]
    raise TypeError(
        f"a vector is a {type(vectors).__name__}. Give a dict of tensors by the parameters' names, a list of such "
        "dicts, or a flat tensor of shape [n] or [n, k]."
    )


def _checked(named: NamedTensors) -> NamedTensors:
    for name, part in named.items():
        if not isinstance(part, Tensor) or not part.is_floating_point():
            description = str(part.dtype) if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"the entries for '{name}' are {description}. Give a floating-point tensor.")
    return named


def _from_flat(space: Space, vectors: Tensor) -> tuple[list[Vec], ToUserForm]:
    if space.ranks > 1:
        raise ValueError(
            "over ranks a vector is a dict of this rank's parameters by name: no rank has the whole. Give {name: "
            "torch.randn_like(p) for name, p in pipe.named_parameters()}."
        )
    _checked({"v": vectors})
    if vectors.dim() not in (1, 2) or vectors.shape[0] != space.size:
        raise ValueError(
            f"a flat vector has shape {list(vectors.shape)}; the parameters have {space.size} entries. Give shape "
            f"[{space.size}], or [{space.size}, k] for k vectors."
        )
    columns = vectors.reshape(space.size, -1).unbind(1)
    return [_cut(space, column) for column in columns], lambda vecs: _columns(space, vecs, vectors)


def _columns(space: Space, vecs: list[Vec], like: Tensor) -> Tensor:
    """Vectors as columns, in the shape and on the device of those that were given."""
    if not vecs:
        return torch.empty_like(like, dtype=space.dtype)
    return torch.stack([flat(space, vec, like.device) for vec in vecs], 1).view(like.shape)


def _cut(space: Space, entries: Tensor) -> Vec:
    vec, first = space.zeros(), 0
    for view in space.named(vec).values():
        view.copy_(entries[first : first + view.numel()].detach().view(view.shape))
        first += view.numel()
    return vec


def flat(space: Space, vec: Vec, device: torch.device | None = None) -> Tensor:
    """All entries in one tensor, parameter after parameter."""
    return torch.cat([part.reshape(-1).to(device) for part in space.named(vec).values()])
