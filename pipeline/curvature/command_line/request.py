"""The request of one `penstock curvature` command: its options by name, which `--help` explains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["MATRICES", "Request"]

MATRICES = ("hessian", "gauss-newton", "fisher")


@dataclass(frozen=True)
class Request:
    """All options. None: of the matrix, as the script says; of an estimate, not asked for."""

    target: str
    matrix: str | None
    params: list[str] | None
    train_mode: bool
    check: bool
    top: int | None
    trace: int | None
    layers: int | None
    density: str | None
    which: str
    tol: float
    max_products: int | None
    samples: int
    rel: float | None
    steps: int
    runs: int
    seed: int
    save: Path | None
    resume: Path | None
    quiet: bool
