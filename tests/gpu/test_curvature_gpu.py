"""What only a GPU shows of curvature: fused attention, several devices, half precision, the allocator's peak.

    make test-gpu

The reference is double backward through the plain module on the same device, with the math kernel for attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
PLACES: dict[str, Callable[[], list[Any]]] = {
    "one GPU": lambda: [GPU] * 3,
    "host and GPU": lambda: ["cpu", GPU, GPU],
    "as if three GPUs": lambda: [Place(GPU, name) for name in "abc"],
    "all GPUs": lambda: [torch.device("cuda", stage % torch.cuda.device_count()) for stage in range(3)],
}
MATRICES = (Hessian, GaussNewton, EmpiricalFisher)


class Attention(nn.Module):
    """Causal, by whatever kernel torch chooses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), Attention(16), nn.LayerNorm(16), Attention(16), nn.Linear(16, 5)
    ).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(7, 9, 6, dtype=dtype), torch.randn(7, 9, 5, dtype=dtype)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def double_backward(model: nn.Sequential, vector: dict[str, Tensor]) -> dict[str, Tensor]:
    plain = copy.deepcopy(model).to(GPU)
    x, y = data(next(plain.parameters()).dtype)
    parameters = dict(plain.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        loss = mean_square(plain(x.to(GPU)), y.to(GPU))
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        parts = [vector[name].to(GPU) for name in parameters]
        return dict(zip(parameters, torch.autograd.grad(grads, list(parameters.values()), parts), strict=True))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("where", PLACES)
def test_hessian_products_are_those_of_double_backward(where: str, schedule: str, checkpoint: str) -> None:
    model = network()
    torch.manual_seed(2)
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    expected = double_backward(model, vector)
    pipe = Pipe(model, [2, 2, 2], 3, devices=PLACES[where](), schedule=schedule, checkpoint=checkpoint)
    product = Hessian(pipe, data(), mean_square) @ vector
    for name, whole in expected.items():
        torch.testing.assert_close(product[name].to(GPU), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("where", PLACES)
def test_products_keep_the_laws_of_second_derivatives(where: str, matrix: type[Hessian]) -> None:
    pipe = Pipe(network(), [2, 2, 2], 3, devices=PLACES[where]())
    report = matrix(pipe, data(), mean_square).check()
    rows = [row for row in zip(report.what, report.errors, report.limits, strict=True) if "same product" not in row[0]]
    assert all(error <= most for _, error, most in rows), str(report)  # kernels need not give the same bits twice


@pytest.mark.parametrize("where", PLACES)
def test_estimates_are_those_of_the_host(where: str) -> None:
    pipe = Pipe(network(), [2, 2, 2], 3, devices=PLACES[where]())
    ours, theirs = Hessian(pipe, data(), mean_square), Hessian(network(), data(), mean_square)
    torch.testing.assert_close(ours.top_eigenpairs(3).values, theirs.top_eigenpairs(3).values, rtol=1e-6, atol=0.0)
    assert ours.trace(20).value == pytest.approx(theirs.trace(20).value, rel=1e-9)
    mine, other = ours.density(steps=20, runs=2), theirs.density(steps=20, runs=2)
    assert mine.moment(2)[0] == pytest.approx(other.moment(2)[0], rel=1e-8)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_is_near_the_full_precision(kind: torch.dtype) -> None:
    H = Hessian(Pipe(network(torch.float32), [2, 2, 2], 3, devices=[GPU] * 3), data(torch.float32), mean_square)
    vec = H.space.random("normal", 0, 0)
    (whole,) = H.products([vec])
    with torch.autocast("cuda", dtype=kind):
        (half,) = H.products([vec])
    assert half[0].dtype == torch.float32
    assert float((half[0] - whole[0]).norm() / whole[0].norm()) < 0.1


def test_the_allocator_s_peak_is_far_below_that_of_double_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(16) for part in (nn.Linear(256, 256), nn.Tanh()))).to(GPU)
    x, y = torch.randn(4096, 256, device=GPU), torch.randn(4096, 256, device=GPU)
    parameters = list(model.parameters())
    H = Hessian(Pipe(model, [4] * 8, 8, devices=[GPU] * 8, checkpoint="always"), (x, y), mean_square)
    vec = H.space.random("normal", 0, 0)

    def whole_graph() -> None:
        grads = torch.autograd.grad(mean_square(model(x), y), parameters, create_graph=True)
        torch.autograd.grad(grads, parameters, list(H.space.named(vec).values()))

    peaks = []
    for compute in (lambda: H.products([vec]), whole_graph):
        compute()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < peaks[1] / 3
