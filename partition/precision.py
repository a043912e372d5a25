"""The precision in which layers compute: torch's switches for float32, autocast, and how to do without.

Where kernels round to fewer bits, what sums in another order change in the last place may change the third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widened(tensor: Tensor) -> Tensor:
    """A tensor as a term of a sum: of half precision in float32, since sums in it would round at each term."""
    return tensor.float() if tensor.dtype in HALF else tensor


class PrecisionSwitch(NamedTuple):
    """The switch `torch.backends.<backend>.<operation>.fp32_precision`."""

    read: Callable[[], str]
    write: Callable[[str], object]


def precision_switch(backend: str, operation: str) -> PrecisionSwitch:
    """The switch of an operation (all, matmul, conv, rnn) of a backend (generic, cuda, mkldnn)."""
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return PrecisionSwitch(partial(read, backend, operation), partial(write, backend, operation))


OPERATIONS = tuple([
    precision_switch(backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")
])  # fmt: skip


@contextmanager
def float32_in_full() -> Iterator[None]:
    """Within: matrices, convolutions and recurrent layers in float32 are computed in float32."""
    lower = [(switch.read(), switch) for switch in OPERATIONS if switch.read() not in ("none", "ieee")]
    try:
        for _, switch in lower:
            switch.write("ieee")
        yield
    finally:
        for precision, switch in lower:
            switch.write("none")  # as a rule it comes from the backend's, or from that of all
            if switch.read() != precision:
                switch.write(precision)


@contextmanager
def weights_cast_anew(grad: bool) -> Iterator[None]:
    """At the end: clear the casts of weights that autocast caches for the length of a region.

    They belong to leaves of one call, so no later call would use them, and they would pile up.
    """
    try:
        yield
    finally:
        if grad and torch.is_autocast_cache_enabled() and torch._C._is_any_autocast_enabled():
            torch.clear_autocast_cache()


def without_autocast() -> AbstractContextManager[None]:
    """Within: no autocast, as in a training loop that calls backward() after its `with torch.autocast` block.

    For what a step does besides forwards, recomputations and losses: a backward under autocast would multiply in
    another type than its forward wherever a layer had switched autocast off.
    """
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext()


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Within: float32 is multiplied in float32: no autocast, and no lower precision that the user allows."""
    with without_autocast(), float32_in_full():
        yield
