"""Inner products over all parameters in one process: those of torch, to any order; and losses that ask for more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline import Pipe


def piped(frozen: bool = False, dtype: torch.dtype = torch.float64) -> Pipe:
    torch.manual_seed(0)
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(3, 3), shared).to(dtype)
    if frozen:
        model[2].requires_grad_(False)
    return Pipe(model, [2, 2], chunks=2)


def tensors(pipe: Pipe, seed: int, trained: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    owners = [one for one in pipe.parameters() if one.requires_grad or not trained]
    return [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.dtype) for one in owners]


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def test_dot_and_norm_are_those_of_the_flat_vectors_to_the_second_derivative() -> None:
    pipe = piped()
    one, other = tensors(pipe, 1), tensors(pipe, 2)
    torch.testing.assert_close(pipe.dot(one, other), flat(one) @ flat(other), rtol=1e-14, atol=0)
    torch.testing.assert_close(pipe.grad_norm(one), flat(one).norm(), rtol=1e-14, atol=0)
    leaves = [part.requires_grad_() for part in one]
    assert torch.autograd.gradcheck(lambda *parts: pipe.dot(parts, other) * pipe.grad_norm(parts), leaves)
    assert torch.autograd.gradgradcheck(lambda *parts: pipe.dot(parts, parts) * pipe.grad_norm(parts), leaves)


def test_a_norm_of_zero_has_derivative_zero_as_torchs_has() -> None:
    pipe = piped()
    leaves = [torch.zeros_like(one).requires_grad_() for one in pipe.parameters()]
    grads = torch.autograd.grad(pipe.grad_norm(leaves), leaves)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_none_stands_for_zeros_and_frozen_parameters_may_be_left_out() -> None:
    pipe = piped(frozen=True)
    every, trained = tensors(pipe, 1), tensors(pipe, 1, trained=True)
    assert len(trained) < len(every)
    assert torch.equal(pipe.dot(trained, trained), flat(trained) @ flat(trained))
    holes = [None, *every[1:]]
    torch.testing.assert_close(pipe.grad_norm(holes), flat(every[1:]).norm(), rtol=1e-14, atol=0)
    assert pipe.grad_norm([None] * len(every)).item() == 0.0


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, wide: torch.dtype) -> None:
    pipe = piped(dtype=dtype)
    one = tensors(pipe, 1)
    norm = pipe.grad_norm(one)
    assert norm.dtype is wide
    torch.testing.assert_close(norm, flat([part.to(wide) for part in one]).norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("types", [(torch.complex128, torch.complex128), (torch.complex128, torch.float64),
                                   (torch.float64, torch.complex128)])  # fmt: skip
def test_of_complex_tensors_the_real_part_counts(types: tuple[torch.dtype, torch.dtype]) -> None:
    pipe = piped()
    one, other = ([torch.ones_like(part, dtype=dtype) * factor for part in pipe.parameters()]
                  for dtype, factor in zip(types, [2 + 3j if dtype.is_complex else 2 for dtype in types]))  # fmt: skip
    expected = torch.vdot(flat(one).to(torch.complex128), flat(other).to(torch.complex128)).real
    assert torch.equal(pipe.dot(one, other), expected)


def test_tensors_at_other_places_are_refused() -> None:
    pipe = piped()
    one = tensors(pipe, 1)
    with pytest.raises(ValueError, match="3 and 4 tensors were given for 4 parameters .* of which 4 are trained"):
        pipe.dot(one[:-1], one)
    with pytest.raises(ValueError, match=r"shape \[3\] stands at the place of a parameter of shape \[3, 3\]"):
        pipe.grad_norm(one[::-1])


def test_a_loss_of_a_step_that_asks_for_a_gradient_by_x_is_refused_by_name() -> None:
    pipe, x = piped(), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def penalty(output: Tensor, target: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (output - target).square().sum() + grad.square().sum()

    with pytest.raises(RuntimeError, match="penalty asks for a gradient by a tensor .* call the Pipe: loss = loss_fn"):
        pipe.step(x, torch.zeros(4, 3, dtype=torch.float64), loss_fn=penalty, loss_reduction="sum")


def test_a_loss_of_a_step_may_ask_for_a_gradient_by_the_output() -> None:
    pipe, x = piped(), torch.randn(4, 3, dtype=torch.float64)

    def bent(output: Tensor, target: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(output.sin().sum(), output, create_graph=True)
        return (output - target).square().sum() + grad.square().sum()

    pipe.step(x, x, loss_fn=bent, loss_reduction="sum")
    found = [one.grad for one in pipe.parameters()]
    wanted = torch.autograd.grad(bent(pipe.to_sequential()(x), x), list(pipe.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
