"""The proof of the chunks' weights: that all a loss divides by is in proportion to the rows, or the same for all.

To compare with the loss of joined outputs in every step would compute each chunk's three times, and hold two outputs,
which are the largest tensors of a language model. So comparisons in steps 1, 2, 4, 8, ... of a loss show how it is
made, and every step shows whether what it divides by has changed since. A step compares whose first chunk shows another
form of loss: torch functions or factors that no comparison has seen. Every step of a loss compares where nothing is
seen, or something uneven that a comparison found right; and where what was summed over rows goes through more than sums
and factors (`(mean - 1).abs()`): on one side of the kink chunks combine, over it they do not. Steps with chunks of
unlike rows are counted by themselves: only they tell a constant from a number of rows, and what varies with rows in one
of them is no constant in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss_means import Divisor, LossForm

Proof: TypeAlias = tuple[bool | None, ...]  # whether each divisor varies with the chunks; None: it is nan or zero


class Shown(NamedTuple):
    """The result of the comparisons of a loss so far.

    Attributes:
        proof: that of the last one.
        form: of the loss, in all of them. None: there was none.
    """

    proof: Proof = ()
    form: LossForm | None = None


class ChunkTrace(NamedTuple):
    """The trace of one chunk's loss.

    Attributes:
        divisors: its divisors. None: unknown.
        form: the form of the loss.
        dtypes: in which rows were summed.
    """

    divisors: tuple[Divisor, ...] | None
    form: LossForm = LossForm()
    dtypes: frozenset[torch.dtype] = frozenset()


def is_alike(one: Proof, earlier: Proof) -> bool:
    """Whether the same divisors vary in a proof as in an earlier one, as far as they can be compared.

    One that was zero is another now: what it multiplied has not been seen.
    """
    pairs = list(zip(one, earlier, strict=True)) if len(one) == len(earlier) else []
    return all([first is None or first == second for first, second in pairs])


def proof(
    divisors: Sequence[tuple[Divisor, ...] | None], rows: Sequence[int], is_counted: bool
) -> Proof | None:
    """The proof that the divisors in the chunks' losses give of the weights of the chunks.

    Args:
        divisors: of each chunk; None: of one whose loss was not traced to output and target.
        rows: of each chunk.
        is_counted: whether the chunks are weighed by the first count of tokens, and not by their rows.

    Returns:
        It. None: they prove nothing.
    """
    seen = [chunk_divisors for chunk_divisors in divisors if chunk_divisors is not None]
    if len(rows) == 1:
        return ()
    if not seen or len(seen) < len(divisors):
        return None
    if len({tuple([divisor.is_count for divisor in chunk_divisors]) for chunk_divisors in seen}) > 1:
        return None
    kinds = [divisor.is_count and is_counted for divisor in seen[0]]
    columns = [[divisor.amount for divisor in column] for column in zip(*seen, strict=True)]
    if sum(kinds) == 1:  # it is the weight itself, with nothing to compare: the host need not wait for it
        columns.pop(kinds.index(True))
        kinds.remove(True)
    numbers = _as_numbers(columns)
    same = [_is_as(column, [1.0] * len(column)) for column in numbers]
    varies = tuple([
        None if isnan(sum(column)) or not any(column) else not constant
        for column, constant in zip(numbers, same, strict=True)
    ])
    if is_counted:  # other counts in proportion to the first, everything else the same for all chunks
        first = numbers[kinds.index(True)] if True in kinds else []
        proven = [
            _is_as(column, first) if kind else constant
            for kind, column, constant in zip(kinds, numbers, same, strict=True)
        ]
        return varies if all(proven) else None
    proven = [
        constant or _is_as(column, rows) or _is_as(_inverse(column), rows)
        for column, constant in zip(numbers, same, strict=True)
    ]
    return varies if all(proven) else None


def _as_numbers(columns: Sequence[Sequence[Tensor | float]]) -> list[list[float]]:
    """All numbers on the host in one copy, so that it waits for a GPU at most once."""
    tensors = [amount for column in columns for amount in column if isinstance(amount, Tensor)]
    with without_function_modes():
        gathered = [tensor.to(tensors[0].device, torch.float64) for tensor in tensors]
        numbers = iter(torch.stack(gathered).tolist() if gathered else ())
    return [[next(numbers) if isinstance(amount, Tensor) else amount for amount in column] for column in columns]


def _inverse(numbers: Sequence[float]) -> list[float]:
    return [1 / number if number else 0.0 for number in numbers]


def _is_as(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    """Whether numbers are in one proportion to the weights. A nan passes: the loss is nan then, too."""
    if any([isnan(number) for number in numbers]):
        return True
    total, all_weights = sum(numbers), sum(weights)
    near = 1e-6 * max([abs(number) for number in numbers])
    return all([
        abs(number * all_weights - total * weight) <= near * all_weights
        for number, weight in zip(numbers, weights, strict=True)
    ])
