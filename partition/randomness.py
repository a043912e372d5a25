"""The default random generators, left as they were found: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def seed_host(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, these on accelerators too."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def host_state() -> tuple[object, bytes, int]:
    """The state of Python's and numpy's generators, to be compared."""
    of_numpy: Any = numpy.random.get_state(legacy=False)
    return random.getstate(), of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"]


@contextmanager
def generators_left(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Leave the default generators as they are now, whatever is drawn within.

    Args:
        devices: the accelerators whose generators are left so, besides those of the host. No other is initialised.
    """
    accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
    kind = next((device.type for device in accelerators), None)
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(sorted(accelerators, key=str), device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
