"""MAML: the parameters from which a step of gradient descent learns a new sine best.

    python examples/maml.py [threads]
    torchrun --nproc-per-node 4 examples/maml.py

Finn et al. 2017 (arXiv 1703.03400). The inner steps keep their graph: the outer gradient goes through them. Dropout is
on and every chunk is recomputed. The parameters end where those of the plain module end, to 1e-10.
"""

from __future__ import annotations

import sys

import torch
from chunked import Chunked, apart
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from pipeline import Pipe

CHUNKS, ROWS, TASKS, ROUNDS, STEPS = 2, 12, 2, 3, 2


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(),
        nn.Linear(32, 1),
    ).double()


def sine() -> tuple[Tensor, Tensor]:
    """Points of a sine of random height and phase; the first half to adapt to, the second to judge by."""
    height, phase, x = 1 + torch.rand(1).double(), 3 * torch.rand(1).double(), 6 * torch.rand(2 * ROWS, 1).double()
    return x, height * torch.sin(x + phase)


def adapted(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The parameters after some inner steps, as functions of those before."""
    fast: dict[str, Tensor] = dict(net.named_parameters())
    for _ in range(STEPS):
        loss = functional.mse_loss(functional_call(net, fast, (x,)), y)
        grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: one - 0.05 * grad for (name, one), grad in zip(fast.items(), grads, strict=True)}
    return fast


def trained(net: nn.Module) -> dict[str, Tensor]:
    """The parameters that this process has after some outer steps, by name."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        losses = []
        for x, y in [sine() for _ in range(TASKS)]:
            fast = adapted(net, x[:ROWS], y[:ROWS])
            losses.append(functional.mse_loss(functional_call(net, fast, (x[ROWS:],)), y[ROWS:]))
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: one.detach() for name, one in net.named_parameters()}


def main() -> None:
    torch.manual_seed(0)
    model = network()
    plain = Chunked(model, CHUNKS)
    pipe = Pipe(model, [2, 2, 2, 2], CHUNKS, checkpoint="always", workers=sys.argv[1] if sys.argv[1:] else None)
    difference = apart(trained(pipe), trained(plain))
    assert difference <= 1e-10, difference
    print("maml: the parameters are those of the plain module to 1e-10")


if __name__ == "__main__":
    main()
