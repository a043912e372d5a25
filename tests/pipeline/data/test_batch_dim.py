"""Time-first data: `Pipe(..., batch_dim=1)` cuts and joins [time, rows, ...] and gives the plain module's numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeline import EagerUpdate, NoChunk, Pipe
from pipeline.curvature import EmpiricalFisher, Hessian

TIME, ROWS, WIDTH = 4, 5, 4


class First(nn.Module):
    def forward(self, made: tuple[Tensor, Any]) -> Tensor:
        return made[0]


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "LSTM": lambda: [nn.LSTM(WIDTH, WIDTH), First()],
    "GRU": lambda: [nn.GRU(WIDTH, WIDTH, num_layers=2), First()],
    "TransformerEncoderLayer": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0)],
    "by time": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh()],
}


def model_of(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *MODELS[name](), nn.Linear(WIDTH, WIDTH)).double()


def series(rows: int = ROWS) -> Tensor:
    return torch.randn(TIME, rows, WIDTH, dtype=torch.float64)


def close(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None and other is not None
    return torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [2, 3, 9])
def test_every_entry_point_gives_the_plain_modules_numbers(name: str, chunks: int) -> None:
    x, target = series().requires_grad_(), series()
    plain = model_of(name)
    loss = mse_loss(plain(x), target)
    loss.backward()
    wanted = [param.grad for param in plain.parameters()]
    for entry, checkpoint in product(("forward", "step", "eager", "Hessian"), ("always", "never")):
        model, own = model_of(name), x.detach().clone().requires_grad_()
        pipe = Pipe(model, [1, len(model) - 1], chunks, batch_dim=1, checkpoint=checkpoint)
        assert pipe.batch_dim == 1
        if entry == "forward":
            mse_loss(pipe(own), target).backward()
        elif entry == "step":
            step = pipe.step(own, target, loss_fn=mse_loss, outputs=True)
            assert close(step.loss, loss.detach()) and close(step.outputs, plain(x).detach())
        elif entry == "eager":
            found: dict[int, Tensor] = {}
            pipe.step(own, target, loss_fn=mse_loss, optimizer=EagerUpdate(
                lambda param, grad: found.update({id(param): grad.clone()})
            ))  # fmt: skip
            assert all(close(found[id(param)], grad) for param, grad in zip(model.parameters(), wanted, strict=True))
            continue
        else:
            shift = torch.ones(sum(param.numel() for param in model.parameters()), dtype=torch.float64)
            assert torch.allclose(
                Hessian(pipe, (x.detach(), target), mse_loss) @ shift,
                Hessian(plain, (x.detach(), target), mse_loss) @ shift, rtol=1e-9, atol=1e-11
            )  # fmt: skip
            continue
        assert close(own.grad, x.grad)
        assert all(close(param.grad, grad) for param, grad in zip(model.parameters(), wanted, strict=True))
    evaluated = Pipe(model_of(name), [1] * len(plain), chunks, batch_dim=1).evaluate(x, target, loss_fn=mse_loss)
    assert close(evaluated.loss, loss.detach()) and close(evaluated.outputs, plain(x).detach())


def test_second_derivatives_go_along_the_same_dim() -> None:
    x = series().requires_grad_()
    plain = model_of("by time")
    found = []
    for module in (plain, Pipe(plain, [1, 3], 3, batch_dim=1)):
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *plain.parameters()], allow_unused=True))
    assert all(map(close, *[[grad for grad in grads if grad is not None] for grads in found]))


class Lengths(nn.Module):
    """Reads [time, rows, width], a length for each row, and one tensor that every chunk gets whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, lengths, table = given
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.gru(packed)[0], total_length=TIME)
        return made + table, made.sum(0).sum(1), lengths


def test_tensors_of_one_dim_are_cut_along_that_and_no_chunk_stays_whole() -> None:
    model = nn.Sequential(Lengths()).double()
    x, lengths, table = series(), torch.tensor([4, 3, 1, 2, 4]), torch.randn(WIDTH).double()
    wanted = model((x, lengths, table))
    found = Pipe(model, [1], 3, batch_dim=1)((x, lengths, NoChunk(table)))
    assert [each.shape for each in found] == [each.shape for each in wanted]
    assert all(map(close, [each.double() for each in found], [each.double() for each in wanted]))


def test_targets_are_cut_alike_where_sizes_are_equal_too() -> None:
    """Tokens [time, rows] of as many times as rows; what the loss makes of them is its own affair."""
    model = nn.Sequential(nn.Embedding(7, WIDTH), nn.GRU(WIDTH, WIDTH), First(), nn.Linear(WIDTH, 7)).double()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    for rows in (TIME, TIME + 1):
        tokens, target = torch.randint(7, (TIME, rows)), torch.randint(7, (TIME, rows))
        step = Pipe(model, [2, 2], 2, batch_dim=1).step(tokens, target, loss_fn=loss_fn)
        assert close(step.loss, loss_fn(model(tokens), target).detach())


@pytest.mark.parametrize("target, words", [
    (torch.zeros(ROWS, 3), r"the target has 3 rows but the input has 5.*batch_dim=1 rows are counted by dim 1.*transp"),
    (torch.zeros(TIME * ROWS), "the target has 20 rows but the input has 5.*flattened to one dim"),
])
def test_targets_that_count_otherwise_are_refused(target: Tensor, words: str) -> None:
    pipe = Pipe(model_of("by time"), [1, 3], 2, batch_dim=1)
    with pytest.raises(ValueError, match=words):
        pipe.step(series(), target, loss_fn=lambda out, _: out.mean())


@pytest.mark.probes
def test_what_counts_rows_along_another_dim_is_refused() -> None:
    for name in ("LSTM", "TransformerEncoderLayer"):  # of the other layout
        model = nn.Sequential(
            nn.LSTM(WIDTH, WIDTH, batch_first=True) if name == "LSTM" else
            nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), First() if name == "LSTM" else nn.Identity()
        ).double()  # fmt: skip
        with pytest.raises(ValueError, match=r"mixes the rows.*along dim 1.*batch_dim=0.*batch_first=False"):
            Pipe(model, [1, 1], 2, batch_dim=1)(series())
    last = nn.Sequential(*MODELS["GRU"](), LastOnly()).double()  # [rows, width]
    with pytest.raises(ValueError, match=r"cannot be joined along dim 1.*\[\[3, 4\], \[4, 4\]\]"):
        Pipe(last, [1, 2], 2, batch_dim=1)(series())


class LastOnly(nn.Module):
    def forward(self, made: Tensor) -> Tensor:
        return made[-1]


@pytest.mark.parametrize("value, kind, words", [
    (-1, ValueError, "batch_dim is -1. Give a whole number of at least 0"),
    (1.0, TypeError, "batch_dim is 1.0. Give a whole"),
    (True, TypeError, "batch_dim is True"), (None, TypeError, "batch_dim is None"),
])
def test_a_batch_dim_that_is_none_is_refused(value: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Pipe(nn.Sequential(nn.Identity()), [1], 2, batch_dim=value)


def test_the_empirical_fisher_says_that_it_counts_rows_along_dim_0() -> None:
    pipe = Pipe(model_of("by time"), [1, 3], 2, batch_dim=1)
    shift = torch.ones(sum(param.numel() for param in pipe.parameters()), dtype=torch.float64)
    with pytest.raises(ValueError, match="EmpiricalFisher.*batch_dim is 1.*Hessian"):
        EmpiricalFisher(pipe, (series(), series()), mse_loss) @ shift
