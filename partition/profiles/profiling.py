"""The profiler: runs a copy of each layer, and says what it takes and holds.

    module, sample ──rows of a chunk──► each_layer(Storages) ──► bytes ───────────────┐
                                        each_layer(timed), repeated ──► seconds ──────┼─► Profile
                                        each_layer(counted), on "meta" ──► FLOPs ─────┘
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from partition.contents import nbytes_of
from partition.errors import PartitionError
from partition.precision import widened
from partition.profiles.amounts import Bytes, MedianSpread
from partition.profiles.measuring import VisitedLoss, each_layer
from partition.profiles.optimizer_state import OptimizerLike, state_bytes
from partition.profiles.profile import LayerProfile, Profile, Work, WorkUnit
from partition.profiles.sandbox import DeviceLike, Sandbox, device_of
from partition.profiles.storages import SavedBytes, Storages
from partition.profiles.working import Pass, counted, timed
from partition.rows import rows_of, with_rows
from partition.splitting import check_module
from scheduler.errors import refuse_unless_finite, whole_number


def profile(
    module: nn.Sequential,
    sample: Any,
    *,
    chunks: int = 1,
    batch_dim: int = 0,
    device: DeviceLike = None,
    optimizer: OptimizerLike = 0,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    timeout: float = 1.0,
) -> Profile:
    """Measure what each layer takes and holds for one chunk.

    A layer runs as a copy, one at a time, in the mode (train, eval) it is in: the module, its buffers and gradients,
    random generators and the sample are left as they were.

    On "meta" nothing runs: fakes of the layers, which have no numbers and take no memory, are counted in FLOPs (of
    matrix products and attention, as torch.utils.flop_counter counts them). They stand on the accelerator if there is
    one, else on the CPU: kernels differ in what they save. (What those of oneDNN and cuDNN keep of an LSTM counts as
    nothing there: torch 2.13 does not tell.)

    Args:
        module: the layers in order; those of other models come from `to_sequential`. Its parameters may be on the meta
            device, if it is profiled there.
        sample: a mini-batch, as a Pipe takes it: a tensor [rows, ...] or any pytree; what every chunk gets whole stands
            in NoChunk(...).
        chunks: how many chunks Pipe makes of it; the largest of them is profiled.
        batch_dim: the dim that counts the rows of sample and target, as for `Pipe`.
        device: where to run (default: where the module's parameters are, or the CPU).
        optimizer: what keeps state for each trained parameter: a factor on its bytes (0: none, 1: SGD with momentum, 2:
            Adam), an optimizer's class, a function that makes one of parameters, or an optimizer.
        loss_fn: (output, target) -> a loss, profiled behind the last layer. None: it is left out.
        target: a mini-batch for it, with as many rows as the sample.
        timeout: seconds to measure for, in all. Passes over the layers are repeated until they are spent; the first
            is finished whatever it takes.

    Returns:
        The profile, of a chunk.

    Raises:
        TypeError, PartitionError: `module` is not the plain nn.Sequential that check_module asks for.
        PartitionError: `timeout` is negative, nan or infinite; there are no rows; `chunks` or `batch_dim` is no whole
            number, or too small a one.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> print(profile(model, torch.rand(8, 4), chunks=4, device="meta", optimizer=torch.optim.Adam))
        a chunk of 2 rows, on meta
        layer  kind           F         I         W         B  parameters  gradients  optimizer  saved  output
        0      Linear  128 FLOP    0 FLOP  128 FLOP  128 FLOP       160 B      160 B      328 B   32 B    64 B
        1      ReLU      0 FLOP    0 FLOP    0 FLOP    0 FLOP         0 B        0 B        0 B   64 B    64 B
        2      Linear  128 FLOP  128 FLOP  128 FLOP  256 FLOP       144 B      144 B      296 B   64 B    32 B
        all            256 FLOP  128 FLOP  256 FLOP  384 FLOP       304 B      304 B      624 B   64 B
    """
    check_module(module)
    refuse_unless_finite("timeout", timeout, error=PartitionError)
    if loss_fn is not None and not callable(loss_fn):
        raise PartitionError(f"loss_fn is {loss_fn!r}, which is not callable. Give (output, target) -> loss, or None.")
    batch_dim = whole_number("batch_dim", batch_dim, least=0, error=PartitionError)
    rows = rows_of(sample, batch_dim)
    count = math.ceil(rows / whole_number("chunks", chunks, least=1, error=PartitionError))
    chunk = with_rows(sample, count, rows, batch_dim)
    loss = None if loss_fn is None else VisitedLoss(loss_fn, with_rows(target, count, rows, batch_dim))
    run_device = device_of(module, device)
    saved, entry = layer_bytes(module, chunk, run_device, loss)
    works, unit = layer_work(module, chunk, run_device, timeout, loss)
    states = _states(module, saved, optimizer)
    layers = [
        LayerProfile(name, type(layer).__name__, work, *state, sizes.buffers, sizes.saved, sizes.constants,
                     sizes.output, sizes.skips, sizes.waits)
        for (name, layer), work, state, sizes in zip(module._modules.items(), works, states, saved)
    ]  # fmt: skip
    loss_profile = None
    if loss_fn is not None:
        sizes, none = saved[-1], Bytes(0)
        loss_profile = LayerProfile("loss", _kind(loss_fn), works[-1], none, none, none, sizes.buffers, sizes.saved,
                                    sizes.constants, sizes.output)  # fmt: skip
    device_name = "meta" if run_device.type == "meta" else str(run_device)
    return Profile(tuple(layers), count, unit, device_name, entry, loss_profile)


def layer_bytes(
    module: nn.Sequential, chunk: Any, device: Any, loss: VisitedLoss | None = None
) -> tuple[list[SavedBytes], tuple[tuple[int, int], ...]]:
    """The bytes that each layer saves, has and returns, the loss behind them; and the storages of the chunk."""
    storages = Storages([*module.parameters(), *module.buffers()])
    return each_layer(module, chunk, Sandbox(device), storages, loss, storages.reuse), storages.entry


def layer_work(
    module: nn.Sequential, chunk: Any, device: Any, timeout: float, loss: VisitedLoss | None = None
) -> tuple[list[Work], WorkUnit]:
    """The seconds or FLOPs of each layer, the loss behind them; and the unit."""
    if device.type == "meta":
        return [_work([pass_]) for pass_ in each_layer(module, chunk, Sandbox(device), counted, loss)], "FLOP"
    until = time.perf_counter() + timeout
    sandbox = Sandbox(device)
    passes = [each_layer(module, chunk, sandbox, timed, loss)]
    while time.perf_counter() < until:
        passes.append(each_layer(module, chunk, sandbox, timed, loss))
    return list(map(_work, zip(*passes))), "s"


def _work(passes: Sequence[Pass]) -> Work:
    return Work(*map(MedianSpread.of, zip(*passes)))


def _states(
    module: nn.Sequential, saved: Sequence[SavedBytes], optimizer: OptimizerLike
) -> list[tuple[Bytes, Bytes, Bytes]]:
    """For each layer bytes of parameters, of gradients and of optimizer state."""
    owners = [[id(p) for _, p in layer.named_parameters(remove_duplicate=False)] for layer in module._modules.values()
              if layer is not None]  # fmt: skip
    layers_with = Counter(owner for ids in owners for owner in dict.fromkeys(ids))
    tied = {owner: number for number, owner in enumerate(o for o, count in layers_with.items() if count > 1)}
    tensor_of = {owner: tensor for ids, amounts in zip(owners, saved) for owner, tensor in zip(ids, amounts.parameters)}
    trained = [id(parameter) for parameter in module.parameters() if parameter.requires_grad]
    state_of = dict(zip(trained, state_bytes(optimizer, [tensor_of[owner] for owner in trained])))
    states = []
    for ids in map(dict.fromkeys, owners):
        sizes = [(owner, nbytes_of(tensor_of[owner])) for owner in ids]
        grads = [(owner, nbytes_of(widened(tensor_of[owner]))) for owner in ids if owner in state_of]
        optimizer_sizes = [(owner, state_of[owner]) for owner, _ in grads]
        states.append((_bytes(sizes, tied), _bytes(grads, tied), _bytes(optimizer_sizes, tied)))
    return states


def _bytes(sizes: Sequence[tuple[int, int]], tied: dict[int, int]) -> Bytes:
    shared = tuple([(tied[owner], size) for owner, size in sizes if owner in tied])
    return Bytes(sum(size for owner, size in sizes if owner not in tied), shared)


def _kind(loss_fn: Any) -> str:
    return type(loss_fn).__name__ if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__name__", "function")
