"""One Hessian-vector product through a checkpointed pipe, and when its actions ran.

    python examples/hessian_product.py

Peers raise here, or are wrong without an error (kakaobrain/torchgpipe#13). The pipe recomputes every chunk, in train
mode with dropout on, and gives the plain module's product.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe, layer_seed
from scheduler import by_name, draw

CHUNKS = 4
SEED = 7


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5)
    ).double()


def hessian_product(loss: Tensor, parameters: list[Tensor], vector: list[Tensor]) -> list[Tensor]:
    """H v: the derivative of gradient . v."""
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    dot = sum((grad * part).sum() for grad, part in zip(grads, vector, strict=True))
    return list(torch.autograd.grad(dot, parameters))


def by_hand(plain: nn.Sequential, x: Tensor) -> Tensor:
    """The plain module over the same chunks with the same dropout masks."""
    torch.manual_seed(SEED)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    outputs = []
    for chunk, part in enumerate(x.tensor_split(CHUNKS)):
        for layer, module in enumerate(plain):
            torch.manual_seed(layer_seed(seed, chunk, layer))
            part = module(part)
        outputs.append(part)
    return torch.cat(outputs)


def main() -> None:
    torch.manual_seed(0)
    model = network()
    plain = copy.deepcopy(model)
    x, y = torch.randn(32, 20).double(), torch.randint(5, (32,))
    vector = [torch.randn_like(parameter) for parameter in model.parameters()]

    places = ["cpu"] * 3  # all stages in this process, as second derivatives of a loss need it
    pipe = Pipe(model, balance=[3, 2, 2], chunks=CHUNKS, devices=places, checkpoint="always")
    torch.manual_seed(SEED)
    ours = hessian_product(functional.cross_entropy(pipe(x), y), list(pipe.parameters()), vector)
    theirs = hessian_product(functional.cross_entropy(by_hand(plain, x), y), list(plain.parameters()), vector)

    difference = max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))
    size = max(part.abs().max().item() for part in theirs)
    print(f"hessian: H v through the checkpointed pipe is the plain module's to {difference / size:.1e} of its size")
    assert difference <= 1e-12 * size

    step = pipe.step(x, y, loss_fn=functional.cross_entropy, trace=True)
    assert step.timeline is not None
    print("\nthe schedule that ran, one slot an action, B two:\n")
    print(draw(by_name("1f1b", lanes=3, chunks=CHUNKS)))
    print("\nand as it was measured here, where one thread drives all three lanes:\n")
    print(draw(step.timeline))


if __name__ == "__main__":
    main()
