"""What does the engine cost over a loop that one would write by hand? Ratios, measured in turns within one run.

    python benchmarks/overhead.py            tiny and big layers, both doors, and torchgpipe where it is installed
    python benchmarks/overhead.py --quick    fewer rounds

The hand-written loops compute exactly what the pipe computes over the same chunks: for the forward door one joined
loss, for a step one loss per chunk; for "always" they run each chunk's forward twice. "us/action" is the difference
divided by the number of actions (2 x stages x chunks). Medians; contenders run in turns, in another order each round.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline import Pipe

STAGES = 2
CHUNKS = 8
BLOCK = 4


def layers(width: int) -> nn.Sequential:
    """Two stages of Linear-ReLU."""
    return nn.Sequential(*(part for _ in range(STAGES) for part in (nn.Linear(width, width), nn.ReLU())))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def contenders(width: int, rows: int) -> dict[str, Callable[[], object]]:
    """Each computes the gradients of one mini-batch."""
    model, x, y = layers(width), torch.randn(rows, width), torch.randn(rows, width)
    xs, ys = x.tensor_split(CHUNKS), y.tensor_split(CHUNKS)

    def joined(outputs: list[Tensor]) -> tuple[Tensor, ...]:
        whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
        (grad,) = torch.autograd.grad(mean_square(whole, y), whole)
        return grad.tensor_split(CHUNKS)

    def by_hand() -> None:
        outputs = [model(part) for part in xs]
        for output, grad in zip(outputs, joined(outputs), strict=True):
            output.backward(grad)

    def by_hand_twice() -> None:
        with torch.no_grad():
            outputs = [model(part) for part in xs]
        for part, grad in zip(xs, joined(outputs), strict=True):
            model(part).backward(grad)

    def loop() -> None:
        for part, target in zip(xs, ys, strict=True):
            (mean_square(model(part), target) * (len(part) / rows)).backward()

    def loop_twice() -> None:
        for part, target in zip(xs, ys, strict=True):
            with torch.no_grad():
                model(part)
            (mean_square(model(part), target) * (len(part) / rows)).backward()

    found: dict[str, Callable[[], object]] = {
        "forward/hand": by_hand,
        "forward/hand, twice": by_hand_twice,
        "step/hand": loop,
        "step/hand, twice": loop_twice,
    }
    for mode in ("never", "except_last", "always"):
        pipe = Pipe(model, [2] * STAGES, CHUNKS, checkpoint=mode)
        found[f"forward/{mode}"] = lambda pipe=pipe: mean_square(pipe(x), y).backward()  # type: ignore[misc]
        found[f"step/{mode}"] = lambda pipe=pipe: pipe.step(x, y, loss_fn=mean_square)  # type: ignore[misc]
        if importlib.util.find_spec("torchgpipe"):
            found[f"torchgpipe/{mode}"] = torchgpipe(model, mode, x, y)
    return {name: cleared(model, run) for name, run in found.items()}


def torchgpipe(model: nn.Sequential, mode: str, x: Tensor, y: Tensor) -> Callable[[], object]:
    """The same forward and backward through torchgpipe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchgpipe import GPipe

        pipe = GPipe(model, [2] * STAGES, devices=["cpu"] * STAGES, chunks=CHUNKS, checkpoint=mode)
    return lambda: mean_square(pipe(x), y).backward()


def cleared(model: nn.Module, run: Callable[[], object]) -> Callable[[], object]:
    def fresh() -> None:
        model.zero_grad(set_to_none=True)
        run()

    return fresh


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender, taken in turns of BLOCK runs, in another order each round.

    The first run of a turn does not count: it finds the caches as another contender left them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name, run in order.sample(list(runs.items()), len(runs)):
            for number in range(BLOCK):
                start = time.perf_counter()
                run()
                if number:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def report(title: str, width: int, rows: int, rounds: int) -> None:
    """Print one table."""
    medians = measure(contenders(width, rows), rounds)
    actions = 2 * STAGES * CHUNKS
    shape = f"{STAGES} stages of Linear({width})-ReLU, {CHUNKS} chunks of {rows // CHUNKS} rows"
    print(f"\n{title}: {shape}, {rounds} rounds of {BLOCK - 1} runs\n")
    print("| door | checkpoint | ms | over the hand-written loop | us/action | torchgpipe's time over ours |")
    print("| --- | --- | --- | --- | --- | --- |")
    for door in ("forward", "step"):
        for mode in ("never", "except_last", "always"):
            ours = medians[f"{door}/{mode}"]
            hand = medians[f"{door}/hand" if mode == "never" else f"{door}/hand, twice"]
            peer = medians.get(f"torchgpipe/{mode}")
            ratio = "-" if peer is None else f"{peer / ours:.2f}"
            cost = (ours - hand) / actions * 1e6
            print(f"| {door} | {mode} | {ours * 1e3:.2f} | {ours / hand:.3f} | {cost:.0f} | {ratio} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.threads} thread(s)")
    report("tiny layers", width=64, rows=16 * CHUNKS, rounds=20 if options.quick else 100)
    report("big layers", width=1024, rows=128 * CHUNKS, rounds=2 if options.quick else 11)


if __name__ == "__main__":
    main()
