"""Train a network on handwritten digits, and look at the curvature of its loss before and after.

    python examples/hessian.py [--out results] [--quick]
    torchrun --nproc-per-node 2 examples/hessian.py

    check the products --> sharpness of the untrained net --> train --> sharpness every few epochs
                       --> top eigenvalues, trace, density, layers of the trained net --> results/*.npz, *.png

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships (Alpaydin and Kaynak, 1998). Under torchrun each
rank has some of the stages, and its part of every vector; rank 0 prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pipeline import Pipe
from pipeline.curvature import Hessian, Result, SharpnessHistory

CHUNKS = 4
BATCH = 64
LR = 0.3


def network() -> nn.Sequential:
    """Smooth all through: with ReLU the Hessian is that of a piece, and jumps from piece to piece."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 32),
        nn.GELU(),
        nn.Linear(32, 10),
    )


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


class Analysis:
    """What is asked of the Hessian, and where answers go: to rank 0's screen, and into a folder.

    Args:
        pipe: the model.
        subset: the data that the loss is of; the same each time.
        samples: products for a trace.
        tol: of eigenvalues' residuals.
        folder: None: nothing is written.
    """

    def __init__(
        self, pipe: Pipe, subset: list[tuple[Tensor, Tensor]], samples: int, tol: float, folder: Path | None
    ) -> None:
        self.H = Hessian(pipe, subset, functional.cross_entropy, seed=0)  # in eval mode, whatever mode the pipe is in
        self.samples, self.tol, self.folder = samples, tol, folder
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.pictures = True
        self.history = SharpnessHistory("Hessian")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, what: object) -> None:
        if self.rank == 0:
            print(what, flush=True)

    def check(self) -> None:
        """Before anything else: do the products keep the laws of second derivatives?"""
        report = self.H.check()
        self.say(report)
        assert report.ok

    def note_sharpness(self, step: int) -> None:
        """One more entry of the history."""
        top = self.H.top_eigenpairs(1, which="LA", tol=self.tol)  # the largest: in magnitude it may be negative
        trace = self.H.trace(self.samples)
        self.history = self.history.with_entry(step, top, trace, loss=self.H.loss().item(), lr=LR)

    def whole(self, k: int, steps: int, runs: int, per_layer: int) -> None:
        """All that is asked of the trained network."""
        self.give("sharpness", self.history)
        self.give("top", self.H.top_eigenpairs(k, tol=self.tol), is_shared=False)  # each rank has a part of the vectors
        self.give("trace", self.H.trace(self.samples))
        self.give("density", self.H.density(steps=steps, runs=runs))
        self.give("layers", self.H.per_layer(per_layer, samples=self.samples, tol=self.tol))

    def give(self, name: str, found: Result, is_shared: bool = True) -> None:
        self.say(f"\n{found}")
        if self.folder is None:
            return
        if not is_shared:
            found.save(self.folder / f"{name}.rank{self.rank}.npz")
        if self.rank != 0:
            return
        if is_shared:
            found.save(self.folder / f"{name}.npz")
        if self.pictures:
            self.draw(name, found)

    def draw(self, name: str, found: Result) -> None:
        try:
            found.plot(self.folder / f"{name}.png" if self.folder else None)
        except ImportError as error:  # all else goes on without matplotlib
            self.pictures = False
            self.say(f"no pictures: {error}")


def train(pipe: Pipe, images: Tensor, labels: Tensor, epochs: int, analysis: Analysis, every: int) -> None:
    """Plain SGD, so that the line 2 / lr means something; sharpness after each `every` epochs."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=LR, momentum=0.0)
    order = torch.Generator().manual_seed(0)
    steps = 0
    for epoch in tqdm(range(epochs), desc="digits", leave=False, disable=None if analysis.rank == 0 else True):
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            pipe.step(images[batch], labels[batch], loss_fn=functional.cross_entropy, optimizer=optimizer)
            steps += 1
        if (epoch + 1) % every == 0:
            analysis.note_sharpness(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for results and pictures; without it all is only printed")
    parser.add_argument("--quick", action="store_true", help="a few seconds: less training, fewer products")
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = data()
    subset, epochs, every, samples, tol = (48, 1, 1, 8, 0.05) if options.quick else (384, 12, 3, 30, 1e-3)

    pipe = Pipe(network(), balance=[4, 5], chunks=CHUNKS, checkpoint="always")
    batches = list(zip(images[:subset].split(192), labels[:subset].split(192), strict=True))
    analysis = Analysis(pipe, batches, samples, tol, options.out)
    analysis.check()
    analysis.note_sharpness(0)
    train(pipe, images, labels, epochs, analysis, every)
    analysis.whole(*((1, 6, 2, 1) if options.quick else (5, 30, 3, 2)))

    before, after = analysis.history.losses[0].item(), analysis.history.losses[-1].item()
    sharpness = analysis.history.values[:, 0].tolist()
    analysis.say(f"\nhessian: loss {before:.3f} -> {after:.3f}, sharpness {sharpness[0]:.3g} -> {sharpness[-1]:.3g}")
    assert options.quick or after < 0.1 * before


if __name__ == "__main__":
    main()
