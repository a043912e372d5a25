"""What does it cost to split a backward into I and W, and what is held in between?

    python benchmarks/split.py            tiny and big layers; torch's own split beside ours
    python benchmarks/split.py --quick    fewer rounds

Time: that of I and W of all chunks over that of B of the same chunks, of one stage on one device, by the clocks of
`step(trace=True)`; the two take turns. torch's own split is `stage_backward_input` and `stage_backward_weight` of
torch.distributed.pipelining (2.13), on the plain module, over `torch.autograd.backward` there.

Bytes: storages made since the step began that are alive when I of a chunk has run, over those alive before it; the
input, the output and parameters with their gradients aside. B would free all of it, W what is left.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as peer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import Pipe
from pipeline.stage.stage import StageRun
from scheduler import Kind, Schedule

CHUNKS = 8


def linears(width: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())))


def blocks(width: int) -> nn.Sequential:
    return nn.Sequential(*(
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)
    ))


def convolutions(width: int) -> nn.Sequential:
    parts = (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(*parts, nn.Conv2d(width, width, 3, padding=1), nn.ReLU())


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "4 x Linear(64)-GELU, 16 rows": (lambda: linears(64), (16, 64)),
    "2 transformer blocks of 32, 2 x 8 tokens": (lambda: blocks(32), (2, 8, 32)),
    "4 x Linear(1024)-GELU, 128 rows": (lambda: linears(1024), (128, 1024)),
    "2 transformer blocks of 256, 8 x 64 tokens": (lambda: blocks(256), (8, 64, 256)),
    "2 x Conv2d(64), 8 images of 32 x 32": (lambda: convolutions(64), (8, 64, 32, 32)),
}


def schedule(kinds: str) -> Schedule:
    order = " ".join(f"0{kind}{chunk}" for chunk in range(CHUNKS) for kind in kinds)
    return Schedule.parse(f"schedule mine, chunks {CHUNKS}, stages on lanes 0\nlane 0: {order}")


def mean_square(output: Tensor, target: Tensor | None) -> Tensor:
    return output.square().mean()


def backward_time(pipe: Pipe, x: Tensor) -> float:
    """What all actions but F take in a step."""
    pipe.zero_grad()
    timeline = pipe.step(x, loss_fn=mean_square, trace=True).timeline
    assert timeline is not None
    return float(sum(event.duration for event in timeline.events if event.action.kind is not Kind.F))


def peer_times(model: nn.Sequential, x: Tensor) -> tuple[float, float]:
    """torch's B, and its I and W, of the same chunks."""
    times = [0.0, 0.0]
    for split in (False, True):
        model.zero_grad()
        for part in x.tensor_split(CHUNKS):
            given = part.detach().requires_grad_()
            output = model(given)
            grad = torch.autograd.grad(mean_square(output, None), output, retain_graph=True)
            start = time.perf_counter()
            if split:
                _, groups = peer.stage_backward_input([output], list(grad), [given], model.parameters())
                peer.stage_backward_weight(model.parameters(), groups)
            else:
                torch.autograd.backward(output, grad[0])
            times[split] += time.perf_counter() - start
    return times[0], times[1]


def ratios(build: Callable[[], nn.Sequential], shape: tuple[int, ...], rounds: int) -> tuple[list[float], list[float]]:
    """(I + W) / B of each round: ours, and torch's."""
    model = build()
    x = torch.randn(CHUNKS * shape[0], *shape[1:])
    whole, split = (
        Pipe(model, [len(model)], CHUNKS, checkpoint="never", schedule=schedule(kinds)) for kinds in ("FB", "FIW")
    )
    ours, theirs = [], []
    for number in range(rounds + 2):
        first, second = (whole, split) if number % 2 else (split, whole)
        one, other = backward_time(first, x), backward_time(second, x)
        b, iw = (one, other) if number % 2 else (other, one)
        peer_b, peer_iw = peer_times(model, x)
        if number > 1:
            ours.append(iw / b)
            theirs.append(peer_iw / peer_b)
    return ours, theirs


class Made(TorchDispatchMode):
    """Every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return made

    def alive(self, aside: set[int]) -> int:
        return sum(
            size for storage, size in self.storages.items() if not storage.expired() and storage.cdata not in aside
        )


def held(build: Callable[[], nn.Sequential], shape: tuple[int, ...]) -> float:
    """Bytes alive after I of a chunk, of those before."""
    model = build()
    pipe = Pipe(model, [len(model)], CHUNKS, checkpoint="never", schedule=schedule("FIW"))
    x = torch.randn(CHUNKS * shape[0], *shape[1:])
    for _ in range(2):
        pipe.step(x, loss_fn=mean_square)
        pipe.zero_grad()
    made = Made()
    found: list[tuple[int, int]] = []
    real = StageRun.backward

    def watched(stage: StageRun, chunk: int, *args: Any) -> Any:
        own = {slot.alias.grad for slot in stage.aliases._slots if slot.alias.grad is not None}
        before = made.alive({grad.untyped_storage()._cdata for grad in own})
        result = real(stage, chunk, *args)
        own = {slot.alias.grad for slot in stage.aliases._slots if slot.alias.grad is not None}
        found.append((before, made.alive({grad.untyped_storage()._cdata for grad in own})))
        return result

    with mock.patch.object(StageRun, "backward", watched), made:
        pipe.step(x, loss_fn=mean_square)
    return statistics.median(after / before for before, after in found)


def spread(values: Sequence[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, 1 thread; {CHUNKS} chunks\n")
    print("| stage, a chunk | (I + W) / B: median (1st to 9th decile) | torch's own split | bytes after I / before |")
    print("| --- | --- | --- | --- |")
    for what, (build, shape) in CASES.items():
        torch.manual_seed(0)
        rounds = 5 if options.quick else 31
        ours, theirs = ratios(build, shape, rounds)
        print(f"| {what} | {spread(ours)} | {spread(theirs)} | {held(build, shape):.2f} |", flush=True)


if __name__ == "__main__":
    main()
