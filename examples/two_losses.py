"""Two losses with graphs of their own, and one optimizer step on both.

    python examples/two_losses.py

An encoder has two heads. Each loss makes its own graph, of its own batch, and is done with it before the other begins:
no more than one graph is held at a time. The merged stores are the gradient of the sum.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from pipeline import GradStore


def build() -> nn.ModuleDict:
    encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
    return nn.ModuleDict({"encoder": encoder, "label": nn.Linear(32, 3), "image": nn.Linear(32, 8)}).double()


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    model = build()
    plain, hasty = copy.deepcopy(model), copy.deepcopy(model)
    labelled, labels, unlabelled = torch.randn(20, 8).double(), torch.randint(3, (20,)), torch.randn(50, 8).double()

    def classify(net: nn.ModuleDict) -> torch.Tensor:
        return functional.cross_entropy(net["label"](net["encoder"](labelled)), labels)

    def reconstruct(net: nn.ModuleDict) -> torch.Tensor:
        return functional.mse_loss(net["image"](net["encoder"](unlabelled)), unlabelled)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store = GradStore(model)
    for loss_of in (classify, reconstruct):
        loss_of(model).backward()
        part = GradStore.from_grads(model)  # every .grad is None again
        print(f"{loss_of.__name__:12} reaches {len(part)} of {len(list(model.parameters()))} parameters")
        store.merge_(part)
    store.apply(optimizer)

    (classify(plain) + reconstruct(plain)).backward()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()

    twice = torch.optim.AdamW(hasty.parameters(), lr=0.1)
    for loss_of in (classify, reconstruct):
        twice.zero_grad()
        loss_of(hasty).backward()
        twice.step()

    expected = parameters_to_vector(plain.parameters())
    right, wrong = ((parameters_to_vector(each.parameters()) - expected).abs().max().item() for each in (model, hasty))
    print(f"one step with the merged store: the weights of (a + b).backward(), to {right:.1e}")
    print(f"step(a), then step(b): other weights, by up to {wrong:.3f} at a rate of 0.1")
    return right, wrong


if __name__ == "__main__":
    main()
