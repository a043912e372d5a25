"""Which models do the ranks train? Small ones in float64, built anew, with something for each law to go wrong.

    layered(8)       linear layers, BatchNorm, dropout and activations in turn: any number, each a stage if need be
    padded(case, n)  one of CASES with Identity layers between, so that it has at least n layers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from law_models import MODELS, Case, normal
from skip_models import SKIPS
from torch import Tensor, nn

CASES = {**MODELS, **SKIPS}


def layered(layers: int, width: int = 4) -> nn.Sequential:
    """Linear, BatchNorm1d, Tanh, Dropout, and again; the first layer and the last are linear."""
    torch.manual_seed(1)
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.Linear(width, width),
        lambda: nn.BatchNorm1d(width),
        nn.Tanh,
        lambda: nn.Dropout(0.3),
    )
    chosen = [kinds[index % 4]() for index in range(layers - 1)]
    return nn.Sequential(*chosen, nn.Linear(width, width)).double()


def padded(name: str, layers: int) -> Case:
    """A case of law_models.py or skip_models.py with at least so many layers."""
    case = CASES[name]()
    old = list(case.model)
    while len(old) < layers:
        old = [layer for each in old[: layers - len(old)] for layer in (each, nn.Identity())] + old[layers - len(old) :]
    return replace(case, model=nn.Sequential(*old))


def even(layers: int, stages: int) -> list[int]:
    """A balance."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def rows(count: int, width: int = 4, seed: int = 1) -> Tensor:
    return normal(count, width, seed=seed)


def square(output: Tensor, target: Tensor) -> Tensor:
    """A mean over rows."""
    return (output - target.to(output.device)).square().sum(1).mean()
