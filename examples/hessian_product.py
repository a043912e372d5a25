"""One Hessian-vector product through a checkpointed pipe, and when the actions of a step ran.

    python examples/hessian_product.py [threads]
    torchrun --nproc-per-node 4 examples/hessian_product.py

Peers raise here, or are wrong without an error (kakaobrain/torchgpipe#13). The pipe recomputes every chunk, in train
mode with dropout on, and gives the plain module's product; over ranks each rank has its parameters' part of it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from chunked import Chunked, apart
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from scheduler import by_name, draw

CHUNKS = 4


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5)
    ).double()


def hessian_product(net: nn.Module, x: Tensor, y: Tensor, vector: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v by name: the derivative of gradient . v."""
    torch.manual_seed(7)
    params = dict(net.named_parameters())
    grads = torch.autograd.grad(functional.cross_entropy(net(x), y), list(params.values()), create_graph=True)
    along = torch.stack([(grad * vector[name]).sum() for name, grad in zip(params, grads, strict=True)]).sum()
    return dict(zip(params, torch.autograd.grad(along, list(params.values())), strict=True))


def main() -> None:
    torch.manual_seed(0)
    model = network()
    plain = Chunked(model, CHUNKS)
    x, y = torch.randn(32, 20).double(), torch.randint(5, (32,))
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}

    pipe = Pipe(model, [2, 2, 2, 1], CHUNKS, checkpoint="always", workers=sys.argv[1] if sys.argv[1:] else None)
    difference = apart(hessian_product(pipe, x, y, vector), hessian_product(plain, x, y, vector))
    assert difference <= 1e-10, difference
    print("hessian: H v through the checkpointed pipe is the plain module's to 1e-10 of its size")

    step = pipe.step(x, y, loss_fn=functional.cross_entropy, trace=True)
    assert step.timeline is not None
    if not dist.is_initialized():  # all lanes are in this process
        print("\nthe schedule that ran, one slot an action, B two:\n")
        print(draw(by_name("1f1b", lanes=4, chunks=CHUNKS)))
        print("\nand as it was measured here:\n")
        print(draw(step.timeline))


if __name__ == "__main__":
    main()
