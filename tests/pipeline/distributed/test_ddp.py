"""Law 7, DistributedDataParallel: around a Pipe on two gloo ranks it gives the averaged gradients of the plain module.

Both ranks are started once; each runs all configurations and writes what it found; the tests compare. The plain module
sees the whole batch, of which each rank has half: a mean over equal halves is the mean of their means.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import two_processes

from pipeline import Pipe

STEPS, ROWS, WIDE = 3, 6, 4
CONFIGS = {
    "always": {"checkpoint": "always"},
    "except_last": {"checkpoint": "except_last"},
    "never": {"checkpoint": "never"},
    "unused always": {"checkpoint": "always", "unused": True},
    "unused never": {"checkpoint": "never", "unused": True},
    "no_sync always": {"checkpoint": "always", "accumulate": 2},
    "no_sync never": {"checkpoint": "never", "accumulate": 2},
    "static graph": {"checkpoint": "always", "static": True},
    "bucket view": {"checkpoint": "always", "bucket_view": True},
    "hooks": {"checkpoint": "always", "hooks": True},
}


class Extra(nn.Module):
    """Has a parameter that no output depends on."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 2), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.linear(x)


def build(unused=False):
    torch.manual_seed(1)
    last = Extra() if unused else nn.Linear(6, 2)
    return nn.Sequential(nn.Linear(WIDE, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), last).double()


def batches():
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS * 2):
        yield tuple(torch.randn(2 * ROWS, wide, dtype=torch.float64, generator=generator) for wide in (WIDE, 2))


def train(module, model, config, cut, no_sync=None):
    """Several optimizer steps; returns the gradients of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found, data = [], batches()
    if config.get("hooks"):
        model[2].weight.register_hook(lambda grad: grad * 2)  # linear: the same before and after averaging
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(config.get("accumulate", 1)):
            x, y = (cut(each) for each in next(data))
            if no_sync is not None and part == 0 and config.get("accumulate"):
                with no_sync():
                    (module(x) - y).pow(2).mean().backward()
            else:
                (module(x) - y).pow(2).mean().backward()
        grads = ((name, param.grad) for name, param in model.named_parameters())
        found.append({name: None if grad is None else grad.clone() for name, grad in grads})
        optimizer.step()
    return found + [{name: param.detach().clone() for name, param in model.named_parameters()}]


def rank_main(rank):
    results = {}
    for name, config in CONFIGS.items():
        model = build(config.get("unused", False))
        ddp = DistributedDataParallel(
            Pipe(model, [2, 2, 1], chunks=3, devices=["cpu"] * 3, checkpoint=config["checkpoint"]),
            find_unused_parameters=config.get("unused", False),
            static_graph=config.get("static", False),
            gradient_as_bucket_view=config.get("bucket_view", False),
        )
        results[name] = train(ddp, model, config, lambda each: each[rank * ROWS : (rank + 1) * ROWS], ddp.no_sync)
    return results


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory):
    return two_processes(rank_main, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("name", CONFIGS)
def test_ddp_around_a_pipe_gives_the_averaged_gradients_of_the_plain_module(name, both_ranks):
    model = build(CONFIGS[name].get("unused", False))
    expected = train(model, model, CONFIGS[name], lambda each: each)
    for rank in both_ranks:
        for ours, theirs in zip(rank[name], expected, strict=True):
            assert list(ours) == list(theirs)
            for key, grad in theirs.items():
                if grad is None:
                    assert ours[key] is None or not ours[key].any(), key  # DDP may fill in zeros
                else:
                    torch.testing.assert_close(ours[key], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_ranks_stay_bitwise_equal(name, both_ranks):
    one, other = (rank[name][-1] for rank in both_ranks)
    assert all(torch.equal(one[key], other[key]) for key in one)
