"""Law: in forward mode arithmetic with Python's numbers gives the values and the tangents that torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pipeline.curvature.products.forward_mode import ConstantsWithoutGrad

PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda x, c: x * c, "rmul": lambda x, c: c * x, "torch.mul": torch.mul, "method mul": lambda x, c: x.mul(c),
    "add": lambda x, c: x + c, "radd": lambda x, c: c + x, "torch.add": torch.add,
    "alpha": lambda x, c: x.add(c, alpha=3),
    "sub": lambda x, c: x - c, "rsub": lambda x, c: c - x, "torch.sub": torch.sub, "div": lambda x, c: x / c,
    "rdiv": lambda x, c: c / x, "torch.div": torch.div, "rounded": lambda x, c: x.div(c, rounding_mode="floor"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("number", [2, 0.3, True, -1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_tangents_and_gradients_are_torchs(name: str, number: Any, dtype: torch.dtype) -> None:
    if "sub" in name and number is True or name == "rounded" and dtype.is_complex:
        pytest.skip("torch has none")
    x, tangent = torch.randn(5, dtype=dtype, requires_grad=True), torch.randn(5, dtype=dtype)
    found: list[list[Tensor]] = []
    for within in (ConstantsWithoutGrad(), torch.enable_grad()):
        with forward_ad.dual_level(), within:
            made = PROGRAMS[name](forward_ad.make_dual(x, tangent), number)
            value, pushed = forward_ad.unpack_dual(made)
            assert pushed is not None
            (grad,) = torch.autograd.grad(value.real.sum(), x)
            found.append([value.detach(), pushed.detach(), grad])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


def test_whole_numbers_and_integers_are_promoted_as_torch_does() -> None:
    for tensor in (torch.arange(3), torch.tensor([True, False]), torch.randn(3), torch.tensor(2)):
        for number in (2, 0.5):
            for function in (torch.mul, torch.add, torch.div):
                expected: Any = function(tensor, number)
                with ConstantsWithoutGrad():
                    made: Any = function(tensor, number)
                assert made.dtype is expected.dtype and torch.equal(made, expected)
