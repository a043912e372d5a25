"""Do all ranks make the same call? If not: what differs, in words, on every rank.

    each rank: {"call": "step (call 7 of the script)", "settings": ..., "input": ...}  --digests-->  all ranks compare
    where they differ  --the words themselves-->  MismatchError

A digest is a whole number of 63 bits for each entry; only where two differ do the words travel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from pipeline.trees import checksums


class MismatchError(RuntimeError):
    """The ranks do not make the same call."""


def digest(text: str) -> int:
    """A whole number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def values_in_words(tensors: Sequence[Tensor]) -> str:
    """The values of some tensors, as two exact sums each: equal for equal values."""
    return " ".join(f"{float(total.item()).hex()} {float(size.item()).hex()}" for total, size, _ in checksums(tensors))


def encoded(words: Mapping[str, str]) -> str:
    return json.dumps(dict(words))


def difference(texts: Sequence[str], names: Sequence[str]) -> str:
    """What differs first, in words.

    Args:
        texts: of each rank, as `encoded` wrote them.
        names: of the entries, in the order in which they are looked at.

    Example:
        >>> print(difference([encoded({"chunks": "4"}), encoded({"chunks": "8"})], ["chunks"]))
        chunks differ between the ranks: rank 0: 4; rank 1: 8
    """
    all_words = [json.loads(text) for text in texts]
    for name in names:
        found = [words.get(name, "nothing") for words in all_words]
        if len(set(found)) > 1:
            return f"{name} differ between the ranks: {_who_has_what(found)}"
    return f"the ranks differ in nothing that words tell: {names}"


def _who_has_what(found: Sequence[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(found):
        groups.setdefault(text, []).append(rank)
    shown = _shortened(list(groups))
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in zip(shown, groups.values(), strict=True))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _shortened(texts: list[str]) -> list[str]:
    """Long texts of several lines: only the lines that not all have."""
    if max(map(len, texts)) < 300:
        return texts
    lines = [text.splitlines() for text in texts]
    common = set(lines[0]).intersection(*lines[1:])
    found = ["; ".join(line for line in each if line not in common) or "nothing else" for each in lines]
    return [text if len(text) < 600 else text[:600] + " ..." for text in found]
