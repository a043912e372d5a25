"""Influence functions: by how much each training point moves a test loss, and whether retraining without it agrees.

    python examples/influence.py [--points 6]
    torchrun --nproc-per-node 2 examples/influence.py

Without point i the optimum of sum_j l_j / n + c / 2 |w|^2 moves by (H + c I)^-1 g_i / n, to first order in 1 / n (Koh
and Liang 2017, arXiv 1703.04730): one linear system tells it for all points. Optima are found by Newton's method, whose
steps are such systems, too.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import Hessian

TRAIN, DECAY = 100, 0.1


def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(out, labels, reduction="sum") / TRAIN


def of(pipe: Pipe, x: Tensor, labels: Tensor) -> Hessian:
    return Hessian(pipe, (x, labels), loss_fn, loss_reduction="sum")


def move(pipe: Pipe, step: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in pipe.named_parameters():
            parameter -= step[name]


def minimise(pipe: Pipe, H: Hessian, steps: int) -> float:
    """Newton's method; the size of its last step."""
    for _ in range(steps):
        gradient = H.gradient()
        whole = {name: gradient[name] + DECAY * parameter.detach() for name, parameter in pipe.named_parameters()}
        step = H.inverse(damping=DECAY) @ whole
        move(pipe, step)
    return H.dot(step, step) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=6, help="how many to leave out, one at a time")
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(n_class=3, return_X_y=True)
    x, y = torch.tensor(images).double() / 16, torch.tensor(labels)
    train, test = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
    model = nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    pipe = Pipe(model, balance=[2, 1], chunks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9, weight_decay=DECAY)
    for _ in range(100):  # near enough for Newton's method
        pipe.step(*train, loss_fn=loss_fn, loss_reduction="sum", optimizer=optimizer)
    H = of(pipe, *train)
    last = minimise(pipe, H, 4)

    on_test = of(pipe, *test)
    direction = H.inverse(damping=DECAY, tol=1e-8) @ on_test.gradient()
    influences = [H.dot(direction, of(pipe, x[i:i + 1], y[i:i + 1]).gradient()) for i in range(TRAIN)]

    before, optimum = on_test.loss(), {name: p.detach().clone() for name, p in pipe.named_parameters()}
    found = []
    for i in torch.tensor(influences).abs().argsort(descending=True)[:options.points].tolist():
        others = torch.arange(TRAIN) != i
        minimise(pipe, of(pipe, x[:TRAIN][others], y[:TRAIN][others]), 3)
        found.append((i, influences[i], float(on_test.loss() - before)))
        move(pipe, {name: p.detach() - optimum[name] for name, p in pipe.named_parameters()})
    assert last < 1e-8
    if os.environ.get("RANK", "0") == "0":
        print("optimum: the last step of Newton's method was below 1e-8\npoint   influence   without it")
        print("\n".join(f"{i:5d}   {predicted:+9.6f}   {actual:+9.6f}" for i, predicted, actual in found))
    for _, predicted, actual in found:
        assert abs(predicted - actual) < 0.35 * abs(actual)


if __name__ == "__main__":
    main()
