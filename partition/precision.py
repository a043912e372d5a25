"""The precision in which float32 is multiplied: torch's switches of the process, and a block without lower ones.

Where kernels round to fewer bits, what sums in another order change in the last place may change the third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
