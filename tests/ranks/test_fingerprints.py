"""Law: the same values have the same fingerprint however they lie in memory, others do not; gradients are rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeline.distributed.digests import Fingerprint, Sketches

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
          torch.uint8, torch.bool, torch.complex64, torch.complex128)  # fmt: skip
SHAPES = ((), (1,), (5,), (127,), (129,), (32, 17), (4, 3, 7, 5), (600, 401), (3, 2, 150, 160), (200_001,))


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def number(*tensors: Tensor) -> int:
    found = Fingerprint(tensors)
    assert found.is_on_host and 0 < found.number < 2**63
    return found.number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_belongs_to_the_values_and_their_order(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = drawn(shape, dtype)
        turned = x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 1 else x
        shifted = torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(shape)
        assert len({number(x), number(x.clone()), number(turned), number(shifted)}) == 1, shape
        if x.dim() == 0 or x.shape[0] == 1:
            continue
        for other in (x.flip(0), x.roll(1, 0)):
            assert (number(other) == number(x)) == torch.equal(other, x), shape
        assert number(x, x[:1]) != number(x[:1], x), shape
        if x.numel() <= 2**17:  # every element counts
            other = x.clone().reshape(-1)
            other[-1] = ~other[-1] if dtype is torch.bool else other[-1] + 1
            assert number(other.view(shape)) != number(x), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("count", [2, 512, 513, 5120, 2**17])
def test_no_two_elements_can_be_exchanged_nor_one_be_changed(count: int, dtype: torch.dtype) -> None:
    x = drawn((count,), dtype)
    x[::3] = -x[::3] if dtype.is_signed else 128 + x[::3]  # the first bit alone
    for trial in range(100):
        one, other = torch.randint(count, (2,), generator=torch.Generator().manual_seed(trial)).tolist()
        if trial % 2:
            other = (one + 1 + trial // 10) % count  # near each other
        exchanged, changed = x.clone(), x.clone()
        exchanged[[one, other]], changed[one] = x[[other, one]], -x[one]
        for y in (exchanged, changed):
            assert (number(y) == number(x)) == torch.equal(x, y), (one, other)


def test_rows_with_the_same_elements_cannot_be_exchanged() -> None:
    for width in (2, 10, 80):
        x = torch.nn.functional.one_hot(torch.arange(640) % width).float()
        for one, other in ((0, 1), (1, 10), (0, 639), (7, 328), (100, 201)):
            y = x.clone()
            y[[one, other]] = x[[other, one]]
            assert (number(y) == number(x)) == torch.equal(x, y), (width, one, other)


def test_views_and_sparse_tensors_have_those_of_their_values() -> None:
    z = drawn((6, 5), torch.complex128)
    assert number(z.conj()) == number(z.conj().resolve_conj()) != number(z)
    assert number(z.conj().imag) == number(z.conj().imag.resolve_neg())
    x = drawn((6, 5), torch.float32).requires_grad_()
    assert number(x[:, ::2]) == number(x[:, ::2].detach().clone())
    assert number(x.detach().to_sparse()) != number((x.detach() + 1).to_sparse())
    assert number(torch.ones(1).expand(50, 50)) == number(torch.ones(50, 50))
    with torch.inference_mode():
        assert number(x) == number(x.clone())


def softmax_grad(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of the mean cross entropy of logits that are all alike, with drawn labels: nothing but the labels tells."""
    logits = torch.zeros(shape, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=torch.Generator().manual_seed(seed))
    torch.nn.functional.cross_entropy(logits.reshape(-1, shape[-1]), labels.reshape(-1)).backward()
    assert logits.grad is not None
    return logits.grad


OTHER: list[Callable[[Tensor], Tensor]] = [
    lambda grad: grad * 2, lambda grad: -grad, lambda grad: grad.roll(1, -1), lambda grad: grad + grad.abs().max(),
    lambda grad: torch.zeros_like(grad), lambda grad: grad * float("inf"),
]  # fmt: skip


def is_like(one: Tensor | None, other: Tensor | None) -> bool:
    (mine,), (theirs,) = Sketches([one]).values, Sketches([other]).values
    assert mine.is_like(theirs) == theirs.is_like(mine)
    return mine.is_like(theirs)


@pytest.mark.parametrize("shape", [(2, 3), (32, 10), (8, 64, 50), (4, 300, 200), (1, 20_000), (3000, 2)], ids=str)
def test_gradients_are_alike_but_for_rounding(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        grad = softmax_grad(shape, 1, dtype)
        for seed in range(20):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            assert is_like(grad, grad * (1 + torch.finfo(dtype).eps * noise))
        assert is_like(grad, grad.clone())
        assert is_like(grad, grad.transpose(0, -1).contiguous().transpose(0, -1))
        assert not is_like(grad, softmax_grad(shape, 2, dtype))
        assert not is_like(grad, None)
        assert not any(is_like(grad, other(grad)) for other in OTHER)


def test_gradients_without_values_or_of_other_kinds_are_alike_too() -> None:
    for grad in (
        torch.zeros(3, 4), torch.zeros(0, 4), torch.tensor(2.0), torch.ones(()).expand(5, 6), torch.ones(3, 0),
        torch.full((3, 4), float("nan")), drawn((4, 5), torch.complex128), drawn((4, 5), torch.float64).to_sparse(),
    ):  # fmt: skip
        assert is_like(grad, grad.clone())
    assert is_like(None, torch.zeros(3, 4))
