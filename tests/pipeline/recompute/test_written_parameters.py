"""Layers that write their own parameters in a forward: right where nothing is recomputed, else refused in words."""

import pytest
import torch
from by_chunks import CHECKPOINTS, assert_same_grads, step_by_chunks, twins
from torch import nn

from pipeline import CheckpointError, Pipe

WIDE, CHUNKS = 6, 3
mse = nn.functional.mse_loss


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, WIDE, max_norm=0.5)

    def forward(self, x):
        return x + self.table((x[:, 0].abs() * 3).long().clamp(0, 9))


class ActNorm(nn.Module):
    """Takes its first values from the first data it sees."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDE))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.ready.fill_(1)
        return x * self.scale


def model_of(kind):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDE, WIDE), kind(), nn.Tanh(), kind(), nn.Linear(WIDE, 2)).double()


def data():
    torch.manual_seed(6)
    return torch.randn(12, WIDE, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)


def assert_right(ours, theirs, checkpoint):
    x, y = data()
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint=checkpoint)
    pipe.step(x, y, loss_fn=mse)
    step_by_chunks(theirs, x, y, CHUNKS, mse)
    assert_same_grads(ours, theirs)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("kind", [Renormed, ActNorm])
def test_a_layer_that_writes_its_parameters_is_right_where_nothing_is_recomputed(kind):
    assert_right(*twins(model_of(kind)), "never")


@pytest.mark.parametrize("kind", [Renormed, ActNorm])
def test_else_it_is_refused_with_that_remedy(kind):
    pipe = Pipe(model_of(kind), [2, 3], CHUNKS, checkpoint="always", schedule="gpipe")
    with pytest.raises(CheckpointError, match=r"If a layer writes it within its forward.*use checkpoint='never'"):
        pipe.step(*data(), loss_fn=mse)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_a_forward_without_gradients_has_initialised_is_right_in_every_mode(checkpoint):
    ours, theirs = twins(model_of(ActNorm))
    for model in (Pipe(ours, [2, 3], CHUNKS).to_sequential(), theirs):
        with torch.no_grad():
            model(data()[0])
    assert_right(ours, theirs, checkpoint)
