"""The work of one layer: seconds or FLOPs of F, of B, and of its halves I and W as a stage runs them.

    x ──► layer ──► y ──► B                             each of a graph of its own
    x ──► layer ──► y ──► I ──gradients that wait──► W  (partition/halves.py)
"""

from collections.abc import Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from partition.halves import LateGrads
from partition.profiles.backwards import backward, first_half, second_half
from partition.profiles.measuring import RunInput, VisitedLayer, outputs_of

__all__ = ["Pass", "counted", "counter", "timed"]


class Pass(NamedTuple):
    """The work of the actions of one run, in seconds or FLOPs: F, I, W, and B, both halves in one run of autograd."""

    forward: float
    input: float
    weight: float
    backward: float


# ------------------------------------------------------------------------------------------------------------ seconds


def timed(layer: nn.Module, x: Any, here: VisitedLayer) -> tuple[Pass, Any]:
    """Seconds of the actions.

    What is done once (lazy parameters, choice of kernels) is done in runs that do not count, one of each kind.
    """
    then = copy_context()  # what was stashed before is there for each run
    then.copy().run(_clocked, layer, x, here)
    halves = None
    if _is_trained(layer):
        then.copy().run(_clocked_halves, layer, x, here)
        halves, _ = then.copy().run(_clocked_halves, layer, x, here)
    (forward, backward), y = _clocked(layer, x, here)
    return Pass(forward, *(halves or (backward, 0.0)), backward), y


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _clocked(layer: nn.Module, x: Any, here: VisitedLayer) -> tuple[tuple[float, float], Any]:
    """Seconds of F and B."""
    given = RunInput(x, here.pops)
    begun = here.sandbox.now()
    y = layer(given.value)
    made = here.sandbox.now()
    outputs = outputs_of(y, here.stashes)
    backward(outputs, _like(outputs), given.targets(layer))
    return (made - begun, here.sandbox.now() - made), y


def _clocked_halves(layer: nn.Module, x: Any, here: VisitedLayer) -> tuple[tuple[float, float], Any]:
    """Seconds of I and W."""
    given = RunInput(x, here.pops)
    y = layer(given.value)
    made = here.sandbox.now()
    parts = _first_half(y, here, given, layer)
    halfway = here.sandbox.now()
    second_half(parts)
    return (halfway - made, here.sandbox.now() - halfway if parts else 0.0), y


def _first_half(y: Any, here: VisitedLayer, given: RunInput, layer: nn.Module) -> list[LateGrads]:
    outputs = outputs_of(y, here.stashes)
    return first_half(outputs, _like(outputs), given.targets(layer), list(layer.parameters()))


def _like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the right shape, dtype and device that cost nothing to make: the outputs themselves."""
    return [tensor.detach() for tensor in outputs]


# -------------------------------------------------------------------------------------------------------------- FLOPs


def counted(layer: nn.Module, x: Any, here: VisitedLayer) -> tuple[Pass, Any]:
    """FLOPs of the actions."""
    given = RunInput(x, here.pops)
    with counter() as forward:
        y = layer(given.value)
    with counter() as inputs:
        parts = _first_half(y, here, given, layer)
    with counter() as weights:
        second_half(parts)
    first, second = inputs.get_total_flops(), weights.get_total_flops()
    return Pass(forward.get_total_flops(), first, second, first + second), y  # W calls the kernels that B would call


def counter() -> FlopCounterMode:
    """Torch's counter, which knows attention on accelerators; on the CPU it is another operator (torch 2.13)."""
    return FlopCounterMode(display=False, custom_mapping=_ON_CPU)


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return sdpa_backward_flop_count(gradient, query, key, value)


_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
