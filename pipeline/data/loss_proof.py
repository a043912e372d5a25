"""The proof of the chunks' weights: that all a loss divides by is in proportion to the rows, or the same for all.

To compare with the loss of joined outputs in every step would compute each chunk's twice or three times, and hold
outputs, which are the largest tensors of a language model. So comparisons in steps 1, 2, 4, 8, ... of a loss show how
it is made, and every step shows whether what it divides by has changed since. A step compares whose first chunk shows
another form of loss than all comparisons: other torch functions, or another number of factors. Every step of a loss
compares where nothing is seen, or something uneven that a comparison found right; and where what was summed over rows
goes through more than sums and factors (`(mean - 1).abs()`): on one side of the kink chunks combine, over it they do
not; and where Python reads a number, or rows are moved, since what becomes of these is not seen. Steps with chunks of
unlike rows are counted by themselves: only they tell a constant from a number of rows, and what varies with rows in one
of them is no constant in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss_means import Divisor, LossForm

Proof: TypeAlias = tuple[bool | None, ...]  # whether each divisor varies with the chunks; None: it is nan or zero


class LossCount(NamedTuple):
    """The count of mini-batches of a loss function, and what comparisons have shown of it.

    Attributes:
        number: the count.
        proofs: of each form that the first chunk's loss had in a comparison that of the last one; of divisors that were
            zero then that of an earlier one.
        unproven: how many in a row were compared since nothing proved the weights of their chunks.
    """

    number: int = 0
    proofs: Mapping[LossForm, Proof] = MappingProxyType({})
    unproven: int = 0


def is_alike(one: Proof, earlier: Proof) -> bool:
    """Whether the same divisors vary in a proof as in an earlier one, as far as they can be compared.

    One that was zero is another now: what it multiplied has not been seen.
    """
    pairs = list(zip(one, earlier, strict=True)) if len(one) == len(earlier) else []
    return all([first is None or first == second for first, second in pairs])


def with_earlier(one: Proof, earlier: Proof) -> Proof:
    """A proof with what an earlier one shows of divisors that are zero in it: of a term that comes and goes."""
    if len(one) != len(earlier):
        return one
    return tuple([before if flag is None else flag for flag, before in zip(one, earlier, strict=True)])


def proof(
    divisors: Sequence[tuple[Divisor, ...] | None], rows: Sequence[int], rule: str, is_counted: bool
) -> Proof | None:
    """The proof that the divisors in the chunks' losses give of the weights of the chunks.

    Args:
        divisors: of each chunk; None: of one whose loss was not traced to output and target.
        rows: of each chunk.
        rule: by which the chunks are combined, see `Loss.rule`.
        is_counted: whether they are weighed by the first count of tokens that is among the divisors.

    Returns:
        It. None: they prove nothing.
    """
    if len(rows) == 1:
        return ()
    traced = [chunk_divisors for chunk_divisors in divisors if chunk_divisors is not None]
    kinds = {tuple([divisor.is_count for divisor in chunk_divisors]) for chunk_divisors in traced}
    if len(traced) < len(divisors) or len(kinds) != 1:
        return None
    by_place = list(zip(*traced, strict=True))
    weighs = [is_counted and is_count for is_count in kinds.pop()]
    if sum(weighs) == 1:  # it is the weight itself, with nothing to compare: the host need not wait for it
        by_place.pop(weighs.index(True))
        weighs.remove(True)
    numbers, ones = _as_numbers([[divisor.amount for divisor in column] for column in by_place]), [1.0] * len(rows)
    # By counts: those of tokens in proportion to the first, everything else the same for all chunks.
    first = numbers[weighs.index(True)] if True in weighs else []
    others = [ones] if rule == "count" else [ones, rows, [1 / row for row in rows]]
    of_rows = [ones] if rule == "count" else [rows]  # a number of their entries is no constant
    wanted = [
        [first] if is_weight else of_rows if all([divisor.counts_rows for divisor in column]) else others
        for is_weight, column in zip(weighs, by_place, strict=True)
    ]
    proven = [
        any([_is_as(column, weights) for weights in choices])
        for choices, column in zip(wanted, numbers, strict=True)
    ]
    varies = [
        None if isnan(sum(column)) or not any(column) else not _is_as(column, ones) for column in numbers
    ]
    return tuple(varies) if all(proven) else None


def _as_numbers(columns: Sequence[Sequence[Tensor | float]]) -> list[list[float]]:
    """All numbers on the host in one copy, so that it waits for a GPU at most once."""
    tensors = [amount for column in columns for amount in column if isinstance(amount, Tensor)]
    with without_function_modes():
        gathered = [tensor.to(tensors[0].device, torch.float64) for tensor in tensors]
        numbers = iter(torch.stack(gathered).tolist() if gathered else ())
    return [[next(numbers) if isinstance(amount, Tensor) else amount for amount in column] for column in columns]


def _is_as(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    """Whether numbers are in one proportion to the weights. A nan passes: the loss is nan then, too."""
    if any([isnan(number) for number in numbers]):
        return True
    largest = max([abs(number) for number in numbers]) or 1.0  # of which a product may overflow
    parts, all_weights = [number / largest for number in numbers], sum(weights)
    total = sum(parts)
    return all([
        abs(part * all_weights - total * weight) <= 1e-6 * all_weights
        for part, weight in zip(parts, weights, strict=True)
    ])
