"""How many bytes does autograd hold between F and B, and is that the analytic count?

    python benchmarks/memory.py

Counted by saved-tensor hooks: each storage that autograd saves a part of, from then until it is freed; parameters and
the caller's own input aside. The stages are Linear-Tanh blocks: the Linear saves its input, the Tanh its output.

    one chunk in one stage   each block's output, and the stage's input: the output that the stage before may hold too,
                             for chunk 0 a copy of it (a stage that writes its input is found out on a copy)
    peak                     the most, over the actions in the order that ran, of the storages of all (stage, chunk)
                             pairs kept at that moment and of the one that is being recomputed

The inputs of chunks that will be recomputed are held by the pipe, not by autograd: a column of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.execution.plan import CallPlan, plan_forward, plan_step
from scheduler import Kind, by_name

STAGES, BLOCKS, WIDTH, ROWS, CHUNKS = 3, 4, 256, 64, 8


class Counter:
    """Saved-tensor hooks that count the bytes of distinct storages alive, and their peak."""

    def __init__(self, aside: set[int]) -> None:
        self._aside = aside
        self._held: dict[int, list[int]] = {}  # data pointer -> [how often saved, bytes]
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor | _Held:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._aside or tensor.numel() == 0:
            return tensor.detach()
        entry = self._held.setdefault(pointer, [0, tensor.untyped_storage().nbytes()])
        if entry[0] == 0:
            self.now += tensor.numel() * tensor.element_size()
            self.peak = max(self.peak, self.now)
        entry[0] += 1
        held = _Held(tensor.detach())
        weakref.finalize(held, self._free, pointer, tensor.numel() * tensor.element_size())
        return held

    def unpack(self, held: Tensor | _Held) -> Tensor:
        return held if isinstance(held, Tensor) else held.tensor

    def _free(self, pointer: int, size: int) -> None:
        self._held[pointer][0] -= 1
        if self._held[pointer][0] == 0:
            del self._held[pointer]
            self.now -= size


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def analytic(plan: CallPlan, mode: str) -> tuple[int, int]:
    """Peak bytes that autograd saves, and peak bytes of inputs kept for recomputation."""
    (order,) = plan.device_orders
    recomputed = plan.recomputed(mode)
    boundary = ROWS // CHUNKS * WIDTH * 4
    kept: set[tuple[int, int]] = set()
    stashed: set[tuple[int, int]] = set()
    saved_peak = stashed_peak = 0
    for action in order:
        pair = (action.stage, action.chunk)
        if action.kind is Kind.F:
            (stashed if pair in recomputed else kept).add(pair)
        held = {storage for each in {*kept, pair} - (recomputed if action.kind is Kind.F else set())
                for storage in storages(*each, again=each in recomputed)}
        saved_peak = max(saved_peak, len(held) * boundary)
        stashed_peak = max(stashed_peak, len(stashed) * boundary)
        if action.kind is not Kind.F:
            kept.discard(pair)
            stashed.discard(pair)
    return saved_peak, stashed_peak


def storages(stage: int, chunk: int, again: bool) -> set[tuple[object, ...]]:
    """What autograd saves of one chunk in one stage, by name; a recomputation makes outputs of its own."""
    outputs: set[tuple[object, ...]] = {(stage, chunk, block, again) for block in range(BLOCKS)}
    if stage == 0:
        return outputs | ({("copy", stage)} if chunk == 0 and not again else set())  # else a part of the caller's x
    return outputs | {("copy", stage) if chunk == 0 and not again else (stage - 1, chunk, BLOCKS - 1, False)}


def measured(model: nn.Sequential, x: Tensor, run: Callable[[], object]) -> int:
    """Peak bytes that autograd saves while `run` runs."""
    counter = Counter({tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())})
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
        run()
    assert counter.now == 0, "something is still held"
    return counter.peak


def main() -> None:
    torch.set_num_threads(1)
    blocks = [part for _ in range(STAGES * BLOCKS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = nn.Sequential(*blocks)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    print(f"torch {torch.__version__}; {STAGES} stages of {BLOCKS} Linear({WIDTH})-Tanh, {CHUNKS} chunks of", end=" ")
    print(f"{ROWS // CHUNKS} rows, all stages on one device\n")
    print("| call | schedule | checkpoint | saved, KiB | analytic, KiB | ratio | inputs kept to recompute, KiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for entry, schedule in (("forward", "gpipe"), ("step", "gpipe"), ("step", "1f1b")):
        for mode in ("never", "except_last", "always"):
            pipe = Pipe(model, [2 * BLOCKS] * STAGES, CHUNKS, schedule=schedule, checkpoint=mode)
            plan = (plan_forward if entry == "forward" else plan_step)(by_name(schedule, STAGES, CHUNKS), pipe.devices)
            bound, inputs = analytic(plan, mode)
            if entry == "forward":
                found = measured(model, x, lambda: torch.autograd.backward(pipe(x), torch.ones(ROWS, WIDTH)))
            else:
                found = measured(model, x, lambda: pipe.step(x, loss_fn=lambda output, _: output.mean()))
            cells = (f"{found / 1024:.0f}", f"{bound / 1024:.0f}", f"{found / bound:.3f}", f"{inputs / 1024:.0f}")
            print(f"| {entry} | {schedule} | {mode} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
