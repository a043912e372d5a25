"""Measurements of layers: the seconds that each takes, and the bytes that it holds.

    sample ──copy──► x ──► layer 0 ──► y ──cut──► x ──► layer 1 ──► ...
                           │ a deep copy, one at a time, on `device`
                           └─ visit: seconds of forward + backward, or bytes that its backward holds

Nothing of the caller's is changed: a layer is run as a copy, on a copy of its input (an in-place layer writes into
that), with gradients for the copy alone, under forked random generators. Cut: detached, needing a gradient if y did, so
that the graph of one layer is gone before the next runs.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from partition.errors import PartitionError
from partition.splitting import check_module

__all__ = ["Device", "LayerSize", "layer_times", "layer_sizes"]

Device = torch.device | str | int | None
T = TypeVar("T")


class LayerSize(NamedTuple):
    """The memory of one layer, in bytes."""

    activations: int  # saved by its forward for its backward, for the whole sample
    parameters: int


def layer_times(module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device = None) -> list[float]:
    """Measure how long each layer's forward and backward take.

    Args:
        module: the layers in order, run in the mode (train, eval) they are in.
        sample: what the first layer takes: a tensor [batch, ...] or any pytree of tensors and other things.
        timeout: seconds to measure for, in all. Passes over the layers are repeated until they are spent; the first
            is finished whatever it takes. In each pass a layer runs twice, and the second run counts.
        device: where to run the layers (default: where the module's parameters are, or the CPU).

    Returns:
        Seconds per layer, the median over the passes. A layer whose output needs no gradient has no backward.

    Raises:
        TypeError, PartitionError: `module` is not the plain nn.Sequential that check_module asks for.
        PartitionError: `timeout` is negative, nan or infinite.

    Example:
        >>> seconds = layer_times(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(2, 4), timeout=0.01)
        >>> [second > 0 for second in seconds]
        [True, True]
    """
    if not 0 <= timeout < math.inf:
        raise PartitionError(f"timeout must be seconds, 0 or more and finite; got {timeout!r}.")
    where = _device(check_module(module), device)
    until = time.perf_counter() + timeout
    passes = [copy_context().run(_visit_layers, module, sample, where, _seconds)]
    while time.perf_counter() < until:
        passes.append(copy_context().run(_visit_layers, module, sample, where, _seconds))
    return [statistics.median(seconds) for seconds in zip(*passes)]


def layer_sizes(module: nn.Sequential, sample: Any, *, device: Device = None) -> list[LayerSize]:
    """Measure what each layer holds between its forward and its backward.

    Counted are the storages that autograd saves in the layer's forward, each once and whole, without the layer's own
    parameters and buffers. What two neighbours save (the output of one is the input of the other) counts in both.

    Args:
        module: the layers in order, run in the mode (train, eval) they are in.
        sample: what the first layer takes: a tensor [batch, ...] or any pytree of tensors and other things.
        device: where to run the layers (default: where the module's parameters are, or the CPU). "meta" computes
            nothing and allocates nothing, for layers whose forward does not look at values.

    Returns:
        Bytes per layer.

    Raises:
        TypeError, PartitionError: `module` is not the plain nn.Sequential that check_module asks for.

    Example:
        >>> layer_sizes(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.rand(3, 4))
        [LayerSize(activations=48, parameters=40), LayerSize(activations=24, parameters=0)]
    """
    return copy_context().run(_visit_layers, module, sample, _device(check_module(module), device), _size)


def _visit_layers(
    module: nn.Sequential,
    sample: Any,
    device: torch.device,
    visit: Callable[[nn.Module, Any, torch.device], tuple[T, Any]],
) -> list[T]:
    """visit(copy of the layer, its input, device) -> (number, output), layer after layer; the numbers."""
    numbers = []
    with torch.inference_mode(False), torch.enable_grad(), _forked(device):
        x = _moved(sample, device)
        # Not named_children(), which leaves out the second place of a layer that stands in two.
        for name, layer in module._modules.items():
            try:
                number, y = visit(copy.deepcopy(layer).to(device), x, device)
            except Exception as error:
                error.add_note(f"while profiling layer {name!r} ({type(layer).__name__}) on {device}")
                raise
            x = _cut(y)
            numbers.append(number)
    return numbers


def _seconds(layer: nn.Module, x: Any, device: torch.device) -> tuple[float, Any]:
    """Time the second of two runs: what is done once (lazy parameters, choice of kernels) is done in the first."""
    for number in range(2):
        leaves, given = _fresh(x)
        then = copy_context()  # what a skip connection stashed before is there for each run
        begun = _now(device)
        y = then.run(layer, given) if number == 0 else layer(given)
        _backward(y, [*leaves, *layer.parameters()])
        seconds = _now(device) - begun
    return seconds, y


def _size(layer: nn.Module, x: Any, _: torch.device) -> tuple[LayerSize, Any]:
    saved: dict[int, Tensor] = {}  # storage -> a tensor that keeps it alive, so that its address stays its own

    def hold(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # the graph holds this; an output that its own graph holds would never be freed
        saved.setdefault(_storage(tensor), kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda kept: kept):
        y = layer(_fresh(x)[1])
    own = {_storage(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
    held = sum(tensor.untyped_storage().nbytes() for storage, tensor in saved.items() if storage not in own)
    return LayerSize(held, sum(parameter.nbytes for parameter in layer.parameters())), y


def _backward(y: Any, inputs: list[Tensor]) -> None:
    """Backward of all that can have one; to `inputs` alone, for a closure may reach tensors of the caller."""
    outputs = [t for t in pytree.tree_leaves(y) if isinstance(t, Tensor) and t.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if outputs and wanted:
        # An output is a gradient of the right shape, dtype and device that costs nothing to make.
        torch.autograd.backward(outputs, [t.detach() for t in outputs], inputs=wanted)


def _now(device: torch.device) -> float:
    torch.get_device_module(device).synchronize(device)  # does nothing on the CPU
    return time.perf_counter()


def _fresh(x: Any) -> tuple[list[Tensor], Any]:
    """The leaves of a new graph, and x as their clones: no leaf itself, so a layer may write into it."""
    x = _cut(x)
    leaves = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
    return leaves, pytree.tree_map_only(Tensor, torch.clone, x)


def _cut(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), x)


def _moved(sample: Any, device: torch.device) -> Any:
    # Always a copy: a tensor that was made under inference_mode can be a leaf of no graph.
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().to(device, copy=True).requires_grad_(t.requires_grad), sample
    )


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # data_ptr() is 0 on "meta" and for empty tensors
    return address


def _forked(device: torch.device) -> AbstractContextManager[None]:
    """Leave the CPU's random generator, and that of the device, as they are now."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def _device(module: nn.Sequential, device: Device) -> torch.device:
    if device is not None:
        return torch.device(device)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
