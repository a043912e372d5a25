"""The time of a Hessian-vector product over ranks that a script writes by hand, over that of a checkpointed step.

    torchrun --nproc-per-node 2 benchmarks/second_order_ranks.py

48 blocks (LayerNorm, Linear, GELU, Linear; width 64), 512 rows, 4 chunks, a stage a rank, float32, all recomputed, one
thread a rank. Rounds are interleaved; rank 0 prints medians of the ratios of each round, with the quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from curvature import WIDTH, Block
from torch import nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import Hessian

BLOCKS, ROWS, ROUNDS = 48, 512, 15


def main() -> None:
    """Measure, and print."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    pipe = Pipe(nn.Sequential(*[Block() for _ in range(BLOCKS)]), [BLOCKS // ranks] * ranks, 4, checkpoint="always")
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    params = list(pipe.parameters())
    vector = [torch.randn_like(parameter) for parameter in params]
    named = {name: torch.randn_like(parameter) for name, parameter in pipe.named_parameters()}
    operator = Hessian(pipe, (x, y), functional.mse_loss)

    def by_hand() -> None:
        grads = torch.autograd.grad(functional.mse_loss(pipe(x), y), params, create_graph=True)
        torch.autograd.grad(grads, params, vector)

    ways: dict[str, Callable[[], object]] = {
        "step": lambda: pipe.step(x, y, loss_fn=functional.mse_loss),
        "by hand": by_hand,
        "H @ v": lambda: operator @ named,
    }
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 2):  # two to warm up
        times = {name: _seconds(way) for name, way in ways.items()}
        for name in ways if number > 1 else ():
            ratios[name].append(times[name] / times["step"])
    if dist.get_rank() == 0:
        for name, found in ratios.items():
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"{name:10} {middle:.2f} ({low:.2f} to {high:.2f})")


def _seconds(way: Callable[[], object]) -> float:
    dist.barrier()
    begin = perf_counter()
    way()
    dist.barrier()
    return perf_counter() - begin


if __name__ == "__main__":
    main()
