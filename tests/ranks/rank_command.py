"""A command of `penstock` on each rank, as `torchrun -m pipeline ...` runs it: its exit status and what it prints."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from pipeline.__main__ import main


def ran(words: Sequence[str]) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of this rank"""
    path, modules = list(sys.path), set(sys.modules)
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            status = main(words)
    finally:  # the next job may have a script of the same name
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("fit_"):
                del sys.modules[name]
    return status, stdout.getvalue(), stderr.getvalue()
