"""An implicit gradient: how the loss on held-out digits changes with the weight decay of training.

    python examples/implicit_gradient.py [threads]
    torchrun --nproc-per-node 4 examples/implicit_gradient.py

At a minimum w of L(w) + decay/2 |w|^2, dw/d(decay) = -(H + decay)^-1 w, so the held-out loss V changes by
-(H + decay)^-1 dV/dw . w. The solve is conjugate gradients with products by double backward; `dot` is over all
parameters. Dropout is on and every chunk is recomputed. The answer is that of the plain module, to 1e-10.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from chunked import Chunked, apart
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe

CHUNKS, STEPS, DECAY = 4, 8, 0.5
Vector = list[Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 10)
    ).double()


def solved(product: Callable[[Vector], Vector], right: Vector, dot: Callable[[Vector, Vector], Tensor]) -> Vector:
    """Conjugate gradients."""
    found, residual = [torch.zeros_like(part) for part in right], right
    direction, square = residual, dot(residual, residual)
    for _ in range(6):
        image = product(direction)
        length = square / dot(direction, image)
        found = [one + length * part for one, part in zip(found, direction, strict=True)]
        residual = [one - length * part for one, part in zip(residual, image, strict=True)]
        square, before = dot(residual, residual), square
        direction = [one + square / before * part for one, part in zip(residual, direction, strict=True)]
    return found


def answer(net: Pipe | Chunked, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The derivative of the held-out loss by the decay, and this process's part of the solution."""
    torch.manual_seed(1)
    params: Vector = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.2, weight_decay=DECAY)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(net(x[:64]), y[:64]).backward()
        optimizer.step()
    right = list(torch.autograd.grad(functional.cross_entropy(net(x[64:]), y[64:]), params))
    grads = torch.autograd.grad(functional.cross_entropy(net(x[:64]), y[:64]), params, create_graph=True)

    def product(vector: Vector) -> Vector:
        parts = torch.autograd.grad(grads, params, vector, retain_graph=True)
        return [part + DECAY * own for part, own in zip(parts, vector, strict=True)]

    solution = solved(product, right, net.dot)
    by_name = {name: part for (name, _), part in zip(net.named_parameters(), solution, strict=True)}
    return {"derivative": -net.dot(solution, params).detach(), **by_name}


def main() -> None:
    torch.manual_seed(0)
    model = network()
    plain = Chunked(model, CHUNKS)
    digits = load_digits()
    x, y = torch.from_numpy(digits.data[:128] / 16), torch.from_numpy(digits.target[:128])
    pipe = Pipe(model, [2, 2, 2, 1], CHUNKS, checkpoint="always", workers=sys.argv[1] if sys.argv[1:] else None)
    ours, theirs = answer(pipe, x, y), answer(plain, x, y)
    difference = apart(ours, theirs)
    assert difference <= 1e-10, difference
    print(f"implicit gradient: d(held-out loss)/d(decay) = {ours['derivative']:.6f}, the plain module's to 1e-10")


if __name__ == "__main__":
    main()
