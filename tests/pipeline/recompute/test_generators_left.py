"""What a call must leave or find as it was, beyond what the laws of the other files reach."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeline import CheckpointError, Pipe

ROWS = 6


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


def rows() -> Tensor:
    return torch.randn(ROWS, 3, dtype=torch.float64)


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_failed_call_leaves_pythons_and_numpys_generators_as_they_were(entry: str) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * random.random() + float(numpy.random.rand())

    calls = []

    def fails_in_the_third_call(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("third")
        return x

    pipe = Pipe(nn.Sequential(linear(), Apply(noisy), Apply(fails_in_the_third_call)), [2, 1], 3, checkpoint="always")
    before = random.getstate(), numpy.random.get_state()
    with pytest.raises(KeyError):
        pipe(rows()) if entry == "forward" else pipe.step(rows(), loss_fn=lambda out, _: out.mean())
    assert random.getstate() == before[0]
    assert all(numpy.array_equal(one, other) for one, other in zip(numpy.random.get_state(), before[1], strict=True))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_forward_that_writes_a_parameter_through_data_is_named(checkpoint: str) -> None:
    layer = linear()

    def halved(x: Tensor) -> Tensor:
        layer.weight.data.mul_(0.5)
        return layer(x)

    middle = Apply(halved)
    middle.layer = layer
    pipe = Pipe(nn.Sequential(linear(), middle), [1, 1], 3, checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match=r"a forward of stage 1 \(layer 1\) wrote a parameter through .data"):
        pipe(rows())


def test_an_evaluation_whose_outputs_cannot_be_joined_changes_no_buffer() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x.mean()

    counts = Counts()
    pipe = Pipe(nn.Sequential(linear(), counts), [1, 1], 3)
    for outputs in (True, False):
        with pytest.raises(ValueError, match="cannot be joined along dim 0"):
            pipe.evaluate(rows(), loss_fn=lambda out, _: out, outputs=outputs)
        assert counts.seen == 0 and pipe.training


def test_a_sparse_or_complex_output_is_compared_with_its_recomputation() -> None:
    state = {"factor": 1.0}

    def sparse(x: Tensor) -> Tensor:
        return (x * state["factor"]).to_sparse()

    def complex_one(x: Tensor) -> Tensor:
        return torch.complex(x, x * state["factor"])

    for function, last in ((sparse, Tensor.to_dense), (complex_one, torch.abs)):
        state["factor"] = 1.0
        pipe = Pipe(nn.Sequential(linear(), Apply(function), Apply(last)), [1, 1, 1], 2, checkpoint="always")
        pipe(rows()).sum().backward()
        out = pipe(rows()).sum()
        state["factor"] = 2.0
        with pytest.raises(CheckpointError, match="gave other values than its forward"):
            out.backward()


def test_a_sequential_with_state_dict_hooks_is_refused() -> None:
    plain = nn.Sequential(linear())
    plain.register_state_dict_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="state_dict hooks of its own"):
        Pipe(plain)


def test_deepcopies_know_what_their_original_found_out() -> None:
    """A stage that writes its input past the version counters is found on calls 1, 2, 4, ..., and remembered."""
    import copy

    def sneaky(x: Tensor) -> Tensor:
        x.data.mul_(2)
        return x + 1

    pipe = Pipe(nn.Sequential(Apply(sneaky), linear()), [1, 1], 3)
    for each in (pipe, copy.deepcopy(pipe)):
        for _ in range(4):
            x = rows()
            kept = x.clone()
            each(x).sum().backward()
            assert torch.equal(x, kept)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("within", ["the caller's checkpoint", "a layer's checkpoint"])
def test_a_pipe_within_torchs_own_checkpoint_has_the_plain_modules_gradients(
    checkpoint: str, reentrant: bool, within: str
) -> None:
    from torch.utils.checkpoint import checkpoint as torchs_checkpoint

    model = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.5), linear())
    x = rows().requires_grad_()
    pipe = Pipe(model, [2, 2], 3, checkpoint=checkpoint)
    torch.manual_seed(7)
    plain = torch.autograd.grad(pipe(x).square().sum(), [x, *model.parameters()])

    def run(value: Tensor) -> Tensor:
        return torchs_checkpoint(pipe, value, use_reentrant=reentrant)

    alone = within == "the caller's checkpoint"
    outer = run if alone else Pipe(nn.Sequential(Apply(run)), [1], 1, checkpoint=checkpoint)
    x.grad = None
    model.zero_grad()
    if alone:
        torch.manual_seed(7)
        outer(x).square().sum().backward()
        for grad, expected in zip([x.grad, *(p.grad for p in model.parameters())], plain, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    else:  # other masks, since the layer's seed differs: the gradient must be that of the output that was given
        model.eval()
        expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        try:
            outer(x).square().sum().backward()
        except RuntimeError as error:
            assert "outside" in str(error) or "Checkpointing" in str(error)
            return
        for grad, each in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
            torch.testing.assert_close(grad, each, rtol=1e-12, atol=1e-14)
