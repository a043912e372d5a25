"""Touches of what belongs to the process: a layer changes it while it computes, and puts it back.

    with torch.random.fork_rng(): ...     a default generator of the host      torch.utils.checkpoint does so, too
    with sdpa_kernel(...): ...            a switch of torch: which kernels compute, in which precision

Nobody sees afterwards that it did. Stages that did so at the same time, in threads of their own, would compute with
each other's generators and switches. So touches are counted as they happen, and a stage that makes some has the process
for itself (execution/drivers.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from pipeline.common.torch_modes import switch, switches

_SWITCHES = re.compile(
    "_set_(default_dtype|default_tensor|deterministic|float32|fp32|cpu_allow|mkldnn|onednn|nnpack|cudnn|cublas|miopen"
    "|rocm|sdp|math_sdp|blas|linalg)"
)
# As it is called, each is looked up there: by its name, by torch's functions and contexts.
_OUTSIDE_TORCH: tuple[tuple[Any, str], ...] = (random, "setstate"), (numpy.random, "set_state")
_OF_TORCH: tuple[tuple[Any, str], ...] = (
    (torch, "set_rng_state"), (torch.random, "set_rng_state"),
    *[(torch._C, name) for name in dir(torch._C) if _SWITCHES.match(name)],
)  # fmt: skip


class Touches:
    """The number of touches.

    Args:
        of_torch: whether to count those of torch's generators and switches too, or of Python's and numpy's alone.

    Attributes:
        count: of those made while they were `counted`.
    """

    def __init__(self, of_torch: bool) -> None:
        self.count = 0
        self._names = (*_OUTSIDE_TORCH, *_OF_TORCH) if of_torch else _OUTSIDE_TORCH
        self._of_torch = of_torch
        self._switches: tuple[Any, ...] = ()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within: touches are counted, in whatever thread they are made."""
        if self._of_torch:
            self._switches = switches()
        originals = [(module, name, getattr(module, name)) for module, name in self._names]
        try:
            for module, name, function in originals:
                setattr(module, name, self._counting(function))
            yield
        finally:
            for module, name, function in originals:
                setattr(module, name, function)

    def undo(self) -> None:
        """Set the switches to what they were when counting began: each thread has put back what it found."""
        if self._of_torch:
            switch(self._switches)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counting
