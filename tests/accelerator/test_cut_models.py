"""Models that are cut where they stand, on a simulated accelerator, as they are on the host."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_models import MODELS, Chain, Tables, called, doubled, ids
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partition import PartitionError, to_sequential
from partition.models.calls import equal
from pipeline import Pipe

WITH_LSTMS = {"lstm", "levels"}  # of which the simulated accelerator has no kernel


def moved(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("sim:0"), x)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITH_LSTMS])
def test_layers_compute_and_draw_what_the_model_does(name: str, training: bool) -> None:
    kind, inputs = MODELS[name]
    model = kind().double().to("sim:0").train(training)
    layers = to_sequential(model, moved(doubled(inputs(4)))).train(training)
    x = moved(doubled(inputs(5)))
    start, found = [buffer.clone() for buffer in model.buffers()], []
    for compute in (layers, lambda x: called(model, x)):
        for buffer, value in zip(model.buffers(), start, strict=True):
            buffer.copy_(value)
        torch.manual_seed(5)
        found.append([*pytree.tree_leaves(compute(x)), *[each.clone() for each in model.buffers()]])
    assert same(*found)


def test_a_tensor_beside_the_buffers_is_where_the_forward_of_each_stage_takes_it() -> None:
    model, x = Tables().double(), ids(5)
    expected = model(x).detach()
    pipe = Pipe(model, [4, 5], chunks=2, sample=x, devices=["sim:0", "sim:1"])
    for _ in range(3):
        torch.testing.assert_close(pipe(x).cpu(), expected, rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match="angles"):
        model.angles = model.angles + 1
        pipe(x)


class Passing(Chain):
    """What may draw is made of the beginning's values and used at the end, as fused attention with p = 0 is."""

    draws = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        passing = torch.native_dropout(x, 0.5, self.draws and self.training)[0]
        for block in self.blocks:
            x = block(F.dropout(x, 0.1, self.training))
        return x + passing


def test_what_may_draw_and_does_not_is_used_in_another_part() -> None:
    model, x = Passing().to("sim:0"), ids(4).to("sim:0")
    layers, found = to_sequential(model, x), []
    for compute in (layers, model):
        torch.manual_seed(5)
        found.append(compute(x))
    assert same(*found)
    model.draws = True
    with pytest.raises(PartitionError, match="what is drawn at random is used behind block"):
        to_sequential(model, x)


class Restless(nn.Linear):
    """Its last bits are others in each call, as are those of kernels that add by atomics; or more than these."""

    turns, share = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        Restless.turns += 1
        return super().forward(x) * (1 + Restless.turns % 7 * self.share)


def restless(share: float, device: str) -> tuple[nn.Module, Tensor]:
    model = Chain()
    model.blocks = nn.ModuleList(Restless(4, 4) for _ in range(3))
    for block in model.blocks:
        block.share = share
    return model.double().to(device), ids(4).to(device)


def test_last_bits_that_kernels_leave_to_chance_are_no_difference() -> None:
    assert len(to_sequential(*restless(2.0**-50, "sim:0"))) == 5
    for share, device in ((2.0**-50, "cpu"), (2.0**-30, "sim:0")):
        with pytest.raises(PartitionError, match="does not return"):
            to_sequential(*restless(share, device))


class RestlessGradient(torch.autograd.Function):
    """The identity. Its gradient is another in each backward, by a share, drawn from a generator that no one else has:
    so kernels leave it that add by atomics, and more so where they multiply in fewer bits and round up or down."""

    draws = Random(0)

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share if torch.backends.cudnn.conv.fp32_precision == "tf32" else share / 2**14
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + RestlessGradient.draws.uniform(-1, 1) * ctx.share), None


class RestlessBackward(nn.Linear):
    share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return RestlessGradient.apply(super().forward(x), self.share)


class WrongBackward(Chain):
    """A hook between two blocks, which no part has: their gradients are others, and by more than chance."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 1.05)
        return x


def restless_backward(kind: type[Chain], share: float, device: str) -> tuple[nn.Module, Tensor]:
    model = kind()
    model.blocks = nn.ModuleList(RestlessBackward(4, 4) for _ in range(3))
    for block in model.blocks:
        block.share = share
    return model.to(device), ids(4).to(device)


def test_gradients_are_compared_in_full_precision_as_near_as_sums_in_another_order_are() -> None:
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # as torch has it
    for _ in range(10):
        assert len(to_sequential(*restless_backward(Chain, 0.1, "sim:0"))) == 5
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_gradients_that_are_further_away_are_refused(share: float, device: str, dtype: torch.dtype) -> None:
    model, x = restless_backward(WrongBackward, share, device)
    with pytest.raises(PartitionError, match="is not that of the model"):
        to_sequential(model.to(dtype), x)


@pytest.mark.parametrize("mask", [None, torch.finfo(torch.float32).min, -1e4, -float("inf")])
def test_a_number_near_zero_may_differ_alone(mask: float | None) -> None:
    """By what is rounding beside the others that make it, and is much beside the number itself."""
    numbers = torch.randn(8, 16)
    if mask is not None:
        numbers[:, :12] = mask
    numbers[2, 14] = 1e-9
    other = numbers.clone()
    other[2, 14] = 1e-6
    assert equal(other.to("sim:0"), numbers.to("sim:0"))
    assert not equal(other, numbers)
    other[2, 14] = 1e-2
    assert not equal(other.to("sim:0"), numbers.to("sim:0"))


class Covered(Chain):
    """A mask of the lowest number beside what counts."""

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.masked_fill(torch.eye(6, 4, dtype=torch.bool, device=x.device), torch.finfo(x.dtype).min)


def test_beside_a_mask_the_rest_is_compared_as_well() -> None:
    for share, is_near in ((2.0**-50, True), (2.0**-30, False)):
        model, x = restless(share, "sim:0")
        model.finish = partial(Covered.finish, model)
        with nullcontext() if is_near else pytest.raises(PartitionError, match="does not return"):
            to_sequential(model, x)
