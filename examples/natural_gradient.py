"""Natural-gradient steps on digits: the gradient times the inverse of the damped Gauss-Newton matrix.

    python examples/natural_gradient.py [--steps 6]
    torchrun --nproc-per-node 2 examples/natural_gradient.py

For cross-entropy the Gauss-Newton matrix G is the Fisher information, so (G + damping I)^-1 g is Amari's natural
gradient, damped. The damping follows how well the quadratic model of the loss foretold the last step (Levenberg and
Marquardt; Martens 2010). Each step costs some tens of products, of a mini-batch of all rows.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import GaussNewton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    pipe = Pipe(model, balance=[2, 3], chunks=4)
    G = GaussNewton(pipe, (x, y), functional.cross_entropy)

    damping, losses = 0.1, [float(G.loss())]
    for _ in range(options.steps):
        gradient = G.gradient()
        step = G.solve(gradient, damping=damping, tol=0.05).x
        foretold = G.dot(step, gradient) - 0.5 * G.dot(step, G @ step)
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                parameter -= step[name]
        ratio = (losses[-1] - float(G.loss())) / foretold
        damping *= 0.3 if ratio > 0.75 else 3.0 if ratio < 0.25 else 1.0
        losses.append(float(G.loss()))
    if os.environ.get("RANK", "0") == "0":
        print("loss after each step: " + ", ".join(f"{loss:.4f}" for loss in losses))
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main()
