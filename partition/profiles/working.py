"""The work of one layer: seconds or FLOPs of F, of B, and of its halves I and W as a stage runs them.

    x ──► layer ──► y ──► B                             each of a graph of its own
    x ──► layer ──► y ──► I ──gradients that wait──► W  (partition/halves.py)
"""

from collections.abc import Sequence
from contextvars import copy_context
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from partition.halves import LateGrads
from partition.profiles.backwards import backward, first_half, second_half
from partition.profiles.measuring import RunInput, VisitedLayer, outputs_of

Pass: TypeAlias = tuple[float, float, float, float]  # seconds or FLOPs of F, I, W; and B, both halves in one run


# ------------------------------------------------------------------------------------------------------------ seconds


def timed(layer: nn.Module, x: Any, visited: VisitedLayer) -> tuple[Pass, Any]:
    """Seconds of the actions.

    What is done once (lazy parameters, choice of kernels) is done in runs that do not count, one of each kind.
    """
    context = copy_context()  # what was stashed before is there for each run
    context.copy().run(_clocked, layer, x, visited)
    halves: list[float] = []
    if any(parameter.requires_grad for parameter in layer.parameters()):
        context.copy().run(_clocked, layer, x, visited, in_halves=True)
        (_, *halves), _ = context.copy().run(_clocked, layer, x, visited, in_halves=True)
    (forward, backward), y = _clocked(layer, x, visited)
    first, second, *_ = [*(halves or [backward]), 0.0]
    return (forward, first, second, backward), y


def _clocked(layer: nn.Module, x: Any, visited: VisitedLayer, in_halves: bool = False) -> tuple[list[float], Any]:
    """Seconds of F and B; or of F, I and, where gradients wait, W."""
    run_input, now = RunInput(x, visited.pops), visited.sandbox.now
    moments = [now()]
    y = layer(run_input.value)
    moments.append(now())
    if in_halves:
        parts = _first_half(y, visited, run_input, layer)
        if parts:
            moments.append(now())
            second_half(parts)
    else:
        outputs = outputs_of(y, visited.stashes)
        backward(outputs, _like(outputs), run_input.targets(layer))
    moments.append(now())
    return [end - start for start, end in pairwise(moments)], y


def _first_half(y: Any, visited: VisitedLayer, run_input: RunInput, layer: nn.Module) -> list[LateGrads]:
    outputs = outputs_of(y, visited.stashes)
    return first_half(outputs, _like(outputs), run_input.targets(layer), list(layer.parameters()))


def _like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the right shape, dtype and device that cost nothing to make: the outputs themselves."""
    return [tensor.detach() for tensor in outputs]


# -------------------------------------------------------------------------------------------------------------- FLOPs


def counted(layer: nn.Module, x: Any, visited: VisitedLayer) -> tuple[Pass, Any]:
    """FLOPs of the actions."""
    run_input = RunInput(x, visited.pops)
    with counter() as forward:
        y = layer(run_input.value)
    with counter() as inputs:
        parts = _first_half(y, visited, run_input, layer)
    with counter() as weights:
        second_half(parts)
    first, second = inputs.get_total_flops(), weights.get_total_flops()
    return (forward.get_total_flops(), first, second, first + second), y  # W calls the kernels that B would call


def counter() -> FlopCounterMode:
    """Torch's counter, which knows attention on accelerators, and what it does not know (torch 2.13): attention on the
    CPU, and recurrent layers that are one operator."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _recurrence(x: Any, weights: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Each step of each row is multiplied by each matrix; biases are no matrices."""
    return 2 * prod(x[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


def _recurrence_backward(*args: Any, **kwargs: Any) -> Any:
    return 2 * _recurrence(*args)


def _lstm(x: Any, *weights: Any, **kwargs: Any) -> Any:
    return _recurrence(x, weights[:2])


def _lstm_backward(*args: Any, **kwargs: Any) -> Any:
    return 2 * _lstm(*args)


_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.mkldnn_rnn_layer_backward: _lstm_backward,
    torch.ops.aten._cudnn_rnn: _recurrence,
    torch.ops.aten._cudnn_rnn_backward: _recurrence_backward,
}
