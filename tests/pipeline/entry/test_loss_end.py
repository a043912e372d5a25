"""What loss_fn gets is the output of the last stage, whether or not a step or a product keeps or compares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian

CALLS = 6  # numbers 1, 2, 4 compare
Views = Callable[[Tensor], Tensor]


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


LAYOUTS: dict[str, Views] = {
    "itself": lambda x: x.sin(),
    "a view": lambda x: x.sin().view(-1, 1, 5),
    "by columns": lambda x: x.sin().t().contiguous().t(),
    "with gaps": lambda x: x.sin()[:, ::2],
    "at an offset": lambda x: x.sin()[:, 1:4],
    "a linear layer's in three dims": lambda x: nn.functional.linear(x[..., None], x.new_ones(4, 1), x.new_ones(4)),
}
EXPANDED: dict[str, Views] = {
    "expanded": lambda x: x[:, :1].expand(-1, 129),
    "expanded in two dims": lambda x: x[:, :3, None, None].expand(-1, 3, 5, 7),
}


def model_of(last: Views) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), Apply(last))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.gelu(output).mean() + (output.flatten(1)[:, :1] - target).square().mean()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDED])
def test_every_step_has_the_same_bits_however_the_output_is_laid_out(name: str, chunks: int) -> None:
    model = model_of({**LAYOUTS, **EXPANDED}[name])
    pipe, results = Pipe(model, [1, 1], chunks), []
    x, y = torch.randn(9, 5), torch.randn(9, 1)
    for call in range(CALLS):
        step = pipe.step(x, y, loss_fn=mean, outputs=call == 4)
        results.append([step.loss, *[param.grad for param in model.parameters() if param.grad is not None]])
        pipe.zero_grad()
    assert all([all(map(torch.equal, result, results[0])) for result in results])


def writing(output: Tensor, target: Tensor) -> Tensor:
    return (output.mul_(2.0).flatten(1)[:, :1] - target).square().mean()


def not_writing(output: Tensor, target: Tensor) -> Tensor:
    return writing(output * 1.0, target)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_fn_may_write_an_output_in_place_in_every_step(name: str, chunks: int) -> None:
    model = model_of(LAYOUTS[name]).double()
    x, y = torch.randn(9, 5).double(), torch.randn(9, 1).double()
    loss = writing(model(x), y)
    expected = torch.autograd.grad(loss, model[0].parameters())
    pipe = Pipe(model, [1, 1], chunks)
    for call in range(CALLS):
        step = pipe.step(x, y, loss_fn=writing, outputs=call == 4)
        torch.testing.assert_close(step.loss, loss, rtol=1e-12, atol=0)
        for param, grad in zip(model[0].parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=1e-11, atol=1e-13)
        pipe.zero_grad()
        torch.testing.assert_close(pipe.evaluate(x, y, loss_fn=writing).loss, loss, rtol=1e-12, atol=0)


PAIRS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "two views": lambda x: (x.view(-1, 1, 5), x.view(-1, 5, 1)),
    "one and its view": lambda x: (x, x.view(-1, 1, 5)),
    "a view and its base": lambda x: (x.view(-1, 1, 5), x),
    "one and its numbers": lambda x: (x, x.detach()),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_loss_fn_may_not_write_one_of_two_outputs_that_share_memory(name: str, chunks: int) -> None:
    """The plain module sees both written; a step that keeps or compares outputs gave another loss."""

    def loss_fn(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        written, read = outputs
        return written.mul_(2.0).mean() + read.square().mean()

    pipe = Pipe(nn.Sequential(nn.Linear(5, 5), Apply(lambda x: PAIRS[name](x.sin()))), [1, 1], chunks)
    for call in range(CALLS):
        with pytest.raises(RuntimeError, match="loss_fn writes an output .* another output shares memory with it"):
            pipe.step(torch.randn(9, 5), loss_fn=loss_fn, outputs=call == 4)
        with pytest.raises(RuntimeError, match="loss_fn writes an output .* another output shares memory with it"):
            pipe.evaluate(torch.randn(9, 5), loss_fn=loss_fn)


def test_a_loss_that_takes_another_way_and_writes_is_refused_in_that_step() -> None:
    """Its chunks are to be compared, but the output is written. That was called no mean over rows."""
    ways = [torch.square]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ways[-1](output.mul_(2.0) - target).mean()

    pipe = Pipe(model_of(LAYOUTS["itself"]), [1, 1], chunks=3)
    x, y = torch.randn(9, 5), torch.randn(9, 5)
    for _ in range(4):
        pipe.step(x, y, loss_fn=loss_fn)
    ways.append(torch.abs)
    with pytest.raises(RuntimeError, match="but it has written the output in place"):
        pipe.step(x, y, loss_fn=loss_fn)
    expected = torch.abs(pipe.to_sequential()(x) * 2 - y).mean()
    torch.testing.assert_close(pipe.step(x, y, loss_fn=loss_fn).loss, expected)


def doubled(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: 2 * grad)
    return tensor


@pytest.mark.parametrize("change", ["no", "a term", "a hook"])
@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hook_on_the_output_acts_once_in_every_step(name: str, chunks: int, by_layer: bool, change: str) -> None:
    """Where a term began between the steps that compare, it acted twice on the first chunk."""
    begun: list[str] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        output = doubled(output) if change != "a hook" or begun else output
        return mean(output, target) + (output.sin().mean() if change == "a term" and begun else 0.0)

    model = model_of(lambda x: doubled(LAYOUTS[name](x)) if by_layer else LAYOUTS[name](x)).double()
    pipe = Pipe(model, [1, 1], chunks)
    for call in range(CALLS):
        begun += ["step 3"] if call == 2 else []
        x, y = torch.randn(9, 5).double(), torch.randn(9, 1).double()
        loss_fn(model(x), y).backward()
        expected = [param.grad for param in model.parameters()]
        pipe.zero_grad()
        pipe.step(x, y, loss_fn=loss_fn)
        torch.testing.assert_close([param.grad for param in model.parameters()], expected)
        pipe.zero_grad()


@pytest.mark.parametrize("number", range(1, 5))
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_loss_with_a_backward_of_its_own_is_refused_in_every_step(chunks: int, number: int) -> None:
    """Where the output is kept, or steps compare, what it gives was lost."""
    begun: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if begun:
            output.square().mean().backward(retain_graph=True)
        return mean(output, target)

    pipe, x, y = Pipe(model_of(LAYOUTS["itself"]), [1, 1], chunks), torch.randn(9, 5), torch.randn(9, 1)
    for _ in range(1, number):
        pipe.step(x, y, loss_fn=loss_fn)
    begun.append(number)
    for outputs in (False, True):
        with pytest.raises(RuntimeError, match="loss_fn runs a backward of its own|a backward from outside reached"):
            pipe.step(x, y, loss_fn=loss_fn, outputs=outputs)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("matrix", [Hessian, GaussNewton, EmpiricalFisher])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_fn_may_write_an_output_in_every_product(name: str, matrix: type[Hessian], chunks: int) -> None:
    """It was refused as no mean over rows, or as a write to a leaf."""
    pipe = Pipe(model_of(LAYOUTS[name]).double(), [1, 1], chunks)
    x, y = torch.randn(9, 5).double(), torch.randn(9, 1).double()
    v = torch.randn(sum([param.numel() for param in pipe.parameters()])).double()
    for data in ([(x, y)], [(x[:4], y[:4]), (x[4:], y[4:])]):
        written, kept = [matrix(pipe, loss_fn=loss_fn, data=data) for loss_fn in (writing, not_writing)]
        for _ in range(CALLS):
            torch.testing.assert_close(written @ v, kept @ v, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", PAIRS)
def test_loss_fn_may_not_write_one_of_two_outputs_that_share_memory_in_a_product(name: str) -> None:
    def loss_fn(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        written, read = outputs
        return written.mul_(2.0).mean() + read.square().mean()

    pipe = Pipe(nn.Sequential(nn.Linear(5, 5), Apply(lambda x: PAIRS[name](x.sin()))), [1, 1], 3)
    with pytest.raises(RuntimeError, match="loss_fn writes an output .* another output shares memory with it"):
        Hessian(pipe, loss_fn=loss_fn, data=[(torch.randn(9, 5), None)]) @ torch.randn(30)


def test_a_write_to_the_target_that_the_comparison_repeats_is_named() -> None:
    """It was called no mean over rows."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.sub_(1.0)).square().mean()

    pipe = Pipe(model_of(LAYOUTS["itself"]), [1, 1], chunks=3)
    x, y = torch.randn(9, 5), torch.randn(9, 5)
    for call in (
        lambda: pipe.step(x, y, loss_fn=loss_fn),
        lambda: pipe.evaluate(x, y, loss_fn=loss_fn),
        lambda: Hessian(pipe, loss_fn=loss_fn, data=[(x, y)]) @ torch.randn(30),
    ):
        with pytest.raises(RuntimeError, match="loss_fn has written its target in place"):
            call()
