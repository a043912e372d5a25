"""The request of one `penstock curvature` command: its options by name, which `--help` explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from typing_extensions import Self

__all__ = ["MATRICES", "Request"]

MATRICES = ("hessian", "gauss-newton", "fisher")


class _Options:
    """Some of the options of a command."""

    @classmethod
    def among(cls, given: Mapping[str, Any], **more: Any) -> Self:
        """Those of this class, by name."""
        names = [field.name for field in fields(cls) if field.name not in more]  # type: ignore[arg-type]
        return cls(**{name: given[name] for name in names}, **more)


@dataclass(frozen=True)
class Target(_Options):
    """The matrix that is analysed. None: as the script says."""

    target: str
    matrix: str | None
    params: list[str] | None
    train_mode: bool


@dataclass(frozen=True)
class Estimates(_Options):
    """The estimates that are computed, and how. None: not asked for."""

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


@dataclass(frozen=True)
class Request(_Options):
    """All options."""

    of: Target
    estimates: Estimates
    check: bool
    seed: int
    save: Path | None
    resume: Path | None
    quiet: bool

    @classmethod
    def given(cls, options: Mapping[str, Any]) -> Request:
        """The request of a command with these options."""
        return cls.among(options, of=Target.among(options), estimates=Estimates.among(options))
