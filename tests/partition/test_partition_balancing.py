"""Laws of partition.balancing; the first two are torchgpipe's cases, on the CPU."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partition
from partition import PartitionError, balance_by_size, balance_by_time, balance_costs, profile


class Clock:
    """The time that `time.perf_counter` tells, in seconds: layers move it, and nothing else does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __deepcopy__(self, memo: Any) -> "Clock":
        return self  # copies of layers are measured


class Delay(nn.Module):
    def __init__(self, milliseconds: int, clock: Clock | None = None) -> None:
        super().__init__()
        self.seconds, self.clock = milliseconds / 1000, clock

    def forward(self, x: Tensor) -> Tensor:
        assert self.clock is not None
        self.clock.now += self.seconds
        return x


class Tradeoff(nn.Module):
    """`parameters` floats of weights, and `activations` saved tensors of the size of the input."""

    def __init__(self, parameters: int, activations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(parameters))
        self.activations = activations

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.activations):
            x = (x + self.weight.sum()).sigmoid()
        return x


@pytest.mark.parametrize(
    "milliseconds, stages, balance",
    [([4, 8, 12, 16, 20, 24], 2, [4, 2]), ([24, 20, 16, 12, 8, 4], 2, [2, 4]), ([20, 5, 5, 5, 5, 20], 3, [1, 4, 1])],
)
def test_layers_are_balanced_by_the_time_that_they_take(
    milliseconds: list[int], stages: int, balance: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    module = nn.Sequential(*[Delay(each, clock) for each in milliseconds])
    assert balance_by_time(stages, module, torch.rand(1), timeout=0.3) == balance


def test_parameters_weigh_more_as_param_scale_grows() -> None:
    module = nn.Sequential(*[Tradeoff(100 * i, 7 - i) for i in range(1, 7)])
    sample = torch.rand(64)
    assert balance_by_size(2, module, sample, param_scale=0) == [2, 4]
    assert balance_by_size(2, module, sample, param_scale=100) == [4, 2]


def test_activations_weigh_less_as_chunks_grow() -> None:
    module = nn.Sequential(*[Tradeoff(100 * i, 7 - i) for i in range(1, 7)])
    sample = torch.rand(2**16)
    assert balance_by_size(2, module, sample, chunks=1) == [2, 4]
    assert balance_by_size(2, module, sample, chunks=2**16) == [4, 2] == balance_by_size(2, module, sample[:1])


def test_size_is_activations_of_a_chunk_and_scaled_parameters() -> None:
    module = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 2))
    sample = torch.rand(40, 6)
    layers = profile(module, sample, timeout=0).layers
    costs = [layer.saved.total / 4 + 3.0 * layer.parameters.total for layer in layers]
    for stages in range(1, 7):
        balance = balance_by_size(stages, module, sample, chunks=4, param_scale=3.0)
        assert balance == balance_costs(costs, stages)
        assert balance == balance_by_size(stages, module, sample, chunks=4, param_scale=3.0, device="meta")


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_more_stages_than_layers_are_refused_before_anything_runs(balance_by: Any) -> None:
    module = nn.Sequential(Delay(10**6))
    with pytest.raises(PartitionError, match="cannot cut 1 layers into 2 stages"):
        balance_by(2, module, torch.rand(1))


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_a_module_that_is_no_sequential_is_refused_by_type(balance_by: Any) -> None:
    with pytest.raises(TypeError, match="module must be an nn.Sequential.*got Linear"):
        balance_by(1, nn.Linear(1, 1), torch.rand(1))


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, None])
def test_chunks_that_are_no_whole_number_are_refused(chunks: Any) -> None:
    with pytest.raises(PartitionError, match=rf"chunks is {chunks}, but must be a whole number of at least 1"):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.rand(1), chunks=chunks)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_param_scale_that_no_optimizer_has_is_refused(scale: float) -> None:
    with pytest.raises(PartitionError, match=f"param_scale is {scale}, but must be a finite number"):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.rand(1), param_scale=scale)


def test_the_package_exports_what_it_lists() -> None:
    assert all(hasattr(partition, name) for name in partition.__all__)
    assert issubclass(PartitionError, ValueError)
