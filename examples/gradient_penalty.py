"""WGAN-GP on digits: a critic in a Pipe whose loss has a penalty on its gradient by the images.

    python examples/gradient_penalty.py [threads]
    torchrun --nproc-per-node 4 examples/gradient_penalty.py

Gulrajani et al. 2017 (arXiv 1704.00028). Dropout is on and every chunk is recomputed. The critic and the generator end
where those of the plain module end, to 1e-10.
"""

from __future__ import annotations

import copy
import sys

import torch
from chunked import Chunked, apart
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pipeline import Pipe

CHUNKS, ROWS, ROUNDS = 4, 32, 4


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    critic = nn.Sequential(
        nn.Linear(64, 64), nn.SiLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 1)
    )
    generator = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    return critic.double(), generator.double()


def penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """How far the critic's slope is from 1 between real and fake images."""
    between = torch.lerp(real, fake, torch.rand(len(real), 1, dtype=real.dtype)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def trained(critic: nn.Module, generator: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Both networks after some rounds, by name: of the critic what this process has."""
    torch.manual_seed(1)
    critics, makers = (torch.optim.SGD(net.parameters(), lr=0.05) for net in (critic, generator))
    for real in images.split(ROWS)[:ROUNDS]:
        fake = generator(torch.randn(ROWS, 8, dtype=real.dtype))
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty(critic, real, fake.detach())
        critics.zero_grad()
        loss.backward()
        critics.step()
        makers.zero_grad()
        (-critic(fake).mean()).backward()
        makers.step()
    parts = {"critic": critic, "generator": generator}
    return {f"{what} {name}": one.detach() for what, net in parts.items() for name, one in net.named_parameters()}


def main() -> None:
    torch.manual_seed(0)
    critic, generator = networks()
    plain = Chunked(critic, CHUNKS), copy.deepcopy(generator)
    images = torch.from_numpy(load_digits().data / 16)
    pipe = Pipe(critic, [2, 2, 2, 1], CHUNKS, checkpoint="always", workers=sys.argv[1] if sys.argv[1:] else None)
    difference = apart(trained(pipe, generator, images), trained(*plain, images))
    assert difference <= 1e-10, difference
    print("gradient penalty: critic and generator are those of the plain module to 1e-10")


if __name__ == "__main__":
    main()
