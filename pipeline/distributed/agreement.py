"""Agreement of ranks on a call: digests find a difference, and an error describes it on every rank.

    each rank: {"call": "step (call 7 of the script)", "settings": ..., "input": ...}  --digests-->  all ranks compare
    where they differ  --the descriptions-->  MismatchError

A digest is a whole number of 63 bits for each entry; the descriptions themselves are exchanged only where two differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pipeline.distributed.digests import dense_parts

SETTINGS, MODES, OPTIONS, MINI_BATCHES = "the settings", "the modes", "the options", "the mini-batches"
LOADS = "the states"
VALUES, SCALES = "the values of the mini-batches", "the scales of the GradScaler"


class MismatchError(RuntimeError):
    """The ranks do not make the same call."""


def digest(text: str) -> int:
    """A whole number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def values_in_words(tensors: Sequence[Tensor]) -> str:
    """The first values of some tensors, and a digest of all their bytes: rows in another order are other values.

    Example:
        >>> values_in_words([torch.tensor([1.0, 2.0, 3.0, 4.0])])
        '1.0 2.0 3.0 ... (digest 1bc332e0e38ac063684841964919ae14)'
    """
    return ", ".join(_in_words(tensor.detach()) for tensor in tensors)


def _in_words(tensor: Tensor) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    first_values: list[object] = []
    for part in dense_parts(tensor):
        flat = part.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        first_values = flat[:3].tolist()
        hasher.update(f"{part.dtype}{list(part.shape)}".encode())
        hasher.update(flat.view(torch.uint8).numpy().data)
    return f"{' '.join(map(str, first_values))} ... (digest {hasher.hexdigest()})"


def shapes_in_words(named: Iterable[tuple[str, Tensor]]) -> str:
    """Names, shapes and types of tensors, a line each."""
    lines = [f"{name}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in named]
    return "\n".join(lines)


def difference(by_rank: Sequence[Mapping[str, str]]) -> str:
    """A description of the first difference, the same on all ranks: whichever raises first, all tell the same.

    Args:
        by_rank: the descriptions. A rank with fewer entries than others has the reason in these.

    Example:
        >>> print(difference([{"chunks": "4"}, {"chunks": "8"}]))
        chunks differ between the ranks: rank 0: 4; rank 1: 8
    """
    names = list(dict.fromkeys(name for descriptions in sorted(by_rank, key=len) for name in descriptions))
    for name in names:
        texts = [descriptions.get(name, "nothing") for descriptions in by_rank]
        if len(set(texts)) > 1:
            return f"{name} differ between the ranks: {_who_has_what(texts)}"
    return f"rank digests differ but their descriptions agree ({names}); please report this bug"


def _who_has_what(texts: Sequence[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    shown = _shortened(list(groups))
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in zip(shown, groups.values(), strict=True))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _shortened(texts: Sequence[str]) -> list[str]:
    """Texts without the lines that all have."""
    lines = [text.splitlines() for text in texts]
    common = set(lines[0]).intersection(*lines[1:])
    shown = ["; ".join([line for line in own_lines if line not in common]) or "nothing else" for own_lines in lines]
    return [text if len(text) < 600 else text[:600] + " ..." for text in shown]
