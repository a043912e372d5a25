"""A context in which what torch.compile has compiled runs as plain Python.

Under a dispatch mode torch.compile compiles nothing, and remembers not to compile that code later.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def uncompiled() -> AbstractContextManager[None]:
    """Within: modules and functions that are compiled run as plain Python; what they have compiled stays."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
