"""Segment-wise checkpointing by hand: a recurrent net whose weights all segments share, and one optimizer step.

    python examples/segments.py

Forward keeps only the borders of segments. Backward takes them from the last to the first, runs each again, and adds
its gradients to a store. No weight changes before all are done: a step after each segment would move the weights that
the next one is run with, and AdamW's step is not linear in the gradient.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from pipeline import GradStore

SEGMENTS, STEPS, WIDE = 6, 10, 16


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, WIDE), nn.Linear(WIDE, 1)

    def forward(self, state: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        """The state at the segment's end, and the loss of predicting each next value in [steps + 1, rows, 1]."""
        loss = segment.new_zeros(())
        for x, target in zip(segment[:-1], segment[1:], strict=True):
            state = self.cell(x, state)
            loss = loss + nn.functional.mse_loss(self.head(state), target)
        return state, loss


def train(model: Recurrent, state: Tensor, segments: list[Tensor], hasty: bool = False) -> None:
    """One AdamW step with the sum over all segments; `hasty`: one after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    borders = [state.clone()]
    with torch.no_grad():
        for segment in segments[:-1]:
            borders.append(model(borders[-1], segment)[0])
    store, carry = GradStore(model), torch.zeros_like(state)
    for border, segment in zip(reversed(borders), reversed(segments), strict=True):
        end, loss = model(border.requires_grad_(), segment)
        carry, *grads = torch.autograd.grad([loss, end], [border, *model.parameters()], [torch.ones_like(loss), carry])
        store.merge_(GradStore.from_grads(model, grads))
        if hasty or border is borders[0]:  # the last that backward comes to
            store.apply(optimizer)


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    plain = Recurrent().double()
    ours, hasty = copy.deepcopy(plain), copy.deepcopy(plain)
    wave = torch.sin(torch.arange(SEGMENTS * STEPS + 1.0).double()[:, None, None] / 3 + torch.rand(8, 1))
    segments, state = list(wave.unfold(0, STEPS + 1, STEPS).movedim(-1, 1)), torch.zeros(8, WIDE).double()
    plain(state, wave)[1].backward()  # one graph of all 60 steps
    torch.optim.AdamW(plain.parameters(), lr=0.01).step()
    train(ours, state, segments)
    train(hasty, state, segments, hasty=True)
    expected = parameters_to_vector(plain.parameters())
    right, wrong = ((parameters_to_vector(each.parameters()) - expected).abs().max().item() for each in (ours, hasty))
    print(f"a step with the sum over segments: the weights of one backward through everything, to {right:.0e}")
    print(f"a step after each segment: other weights, by up to {wrong:.3f} at a rate of 0.01")
    return right, wrong


if __name__ == "__main__":
    main()
