"""The default random generators, left as they were found: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from partition.generators import OF_HOST, StatedGenerator, put_generators_back, states_of
from partition.process_lock import held


def seed_host(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, these on accelerators too."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def states_of_torch() -> list[Tensor]:
    """The states of torch's default generators, on the host and on accelerators in use, to be compared."""
    accelerator = torch.accelerator.current_accelerator()
    generators = () if accelerator is None else getattr(torch.get_device_module(accelerator), "default_generators", ())
    return [generator.get_state() for generator in (torch.default_generator, *generators)]


@contextmanager
def drawing(share: float) -> Iterator[None]:
    """Within: what Python's and numpy's global generators draw uniformly lies there in its range, and changes no state.

    Args:
        share: in [0, 1).

    Example:
        >>> with drawing(0.5):
        ...     random.uniform(2, 4), float(numpy.random.rand())
        (3.0, 0.5)
    """

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        value = low + (high - low) * share
        return value if size is None else numpy.full(size, value)

    def numbers(size: Any = None) -> Any:
        return uniform(size=size)

    def shaped(*size: int) -> Any:
        return uniform(size=size or None)

    replacements = {
        random: {"random": numbers, "uniform": uniform},
        numpy.random: {"random": numbers, "random_sample": numbers, "rand": shaped, "uniform": uniform},
    }
    originals = [(module, name, getattr(module, name)) for module, names in replacements.items() for name in names]
    try:
        for module, names in replacements.items():
            vars(module).update(names)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


@contextmanager
def generators_left(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Leave the default generators as they are now, whatever is drawn within; no other thread's call runs meanwhile.

    Args:
        devices: the accelerators whose generators are left so, besides those of the host. No other is initialised.
    """
    with held():
        states = states_of(generators_on(devices))
        try:
            yield
        finally:
            put_generators_back(states)


def generators_on(devices: Iterable[torch.device]) -> list[StatedGenerator]:
    """The default generators of the host, and of those of some devices that are accelerators."""
    accelerators = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    return [*OF_HOST, *[_DeviceGenerator(torch.get_device_module(device), device) for device in accelerators]]


class _DeviceGenerator(NamedTuple):
    module: Any
    device: torch.device

    def get_state(self) -> Any:
        return self.module.get_rng_state(self.device)

    def set_state(self, state: Any, /) -> object:
        return self.module.set_rng_state(state, self.device)
