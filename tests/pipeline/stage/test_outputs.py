"""A layer that returns a tensor that it keeps and writes in every forward writes the outputs of earlier chunks."""

import pytest
import torch
from law_models import Apply, normal
from torch import nn

from pipeline import Pipe

WORDS = r"the forward of chunk \d in stage . \(layer.*\) wrote the output of chunk \d \(shape \[2, 4\]\).*out.clone\(\)"


class Workspace(nn.Module):
    """It computes into one of some tensors of its own, which take turns."""

    def __init__(self, count):
        super().__init__()
        self.places = [torch.zeros(8, 4, dtype=torch.float64) for _ in range(count)]
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        place = self.places[self.calls % len(self.places)][: len(x)]
        return Into.apply(x, place)


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place):
        return place.copy_(x * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *layers).double()


ENTRIES = {
    "no_grad": lambda pipe, x: torch.no_grad()(pipe)(x),
    "inference_mode": lambda pipe, x: torch.inference_mode()(pipe)(x),
    "evaluate": lambda pipe, x: pipe.evaluate(x, x, loss_fn=nn.functional.mse_loss, outputs=True).outputs,
    "forward": lambda pipe, x: pipe(x),
    "step": lambda pipe, x: pipe.step(x, x, loss_fn=nn.functional.mse_loss, outputs=True).outputs,
}


@pytest.mark.parametrize(("count", "balance"), [(1, [3]), (1, [1, 2]), (2, [3])])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_output_that_a_later_chunk_writes_is_refused(entry, count, balance):
    pipe = Pipe(model(Workspace(count)), balance, chunks=3, checkpoint="never", schedule="gpipe")
    with pytest.raises(RuntimeError, match=WORDS) as error:
        ENTRIES[entry](pipe, normal(6, 4))
    assert "chunk 0" in str(error.value)


@pytest.mark.parametrize("entry", ENTRIES)
def test_outputs_that_share_memory_and_are_not_written_pass(entry):
    """Chunks of x, a constant, a workspace that is copied."""
    constant, space = normal(1, 4), Workspace(1)
    spread, copied = Apply(lambda x: constant.expand(len(x), -1) + 0 * x), Apply(lambda x: space(x).clone())
    for layer in (nn.Identity(), spread, copied):
        layers, x = model(layer), normal(6, 4)
        pipe = Pipe(layers, [1, 2], chunks=3, checkpoint="never", schedule="gpipe")
        assert torch.equal(ENTRIES[entry](pipe, x), torch.cat([layers(rows) for rows in x.chunk(3)]))


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_loss_may_write_the_outputs_that_it_gets_and_keep_them(entry):
    kept = []

    def loss_fn(output, target):
        kept.append(output.mul_(2))
        return (output - target).square().mean()

    pipe, x = Pipe(model(nn.Linear(4, 4)), [3], chunks=3, schedule="1f1b"), normal(6, 4)
    for _ in range(3):
        getattr(pipe, entry)(x, x, loss_fn=loss_fn)
