"""The history of curvature during training.

    history = SharpnessHistory("Hessian")
    every 100 steps:   history = history.with_entry(step, eigenpairs=..., trace=..., loss=..., lr=...)
    history.save("run.json")      print(history)      history.plot("run.svg")     eigenvalue, trace, 2 / lr over steps

Gradient descent with full batches drives the top eigenvalue up to 2 / lr and then hovers there: the edge of stability,
Cohen et al. 2021 (arXiv 2103.00065).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_count, check_number, shown
from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.estimates.trace import Trace
from pipeline.curvature.results.plots import or_zero, symlog
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import Curve, column, curves, rows, table
from pipeline.curvature.space import HOST


def _empty() -> Tensor:
    return torch.zeros(0, **HOST)


@dataclass(frozen=True, eq=False)
class SharpnessHistory(Result):
    """Curvature over training, one entry for each step at which it was measured. nan stands for "not measured".

    Args:
        matrix: the name of the matrix.
        steps: [entries], int64, growing.
        values: [entries, k], float64: eigenvalues, in the order of the method that found them.
        value_errors: [entries, k], float64, in units of eigenvalue: some eigenvalue is no further from the value.
        traces: [entries], float64.
        trace_errors: [entries], float64, standard errors; inf if unknown.
        losses: [entries], float64.
        lrs: [entries], float64, learning rates. The line 2 / lr is that of plain gradient descent.

    Example:
        >>> from pipeline.curvature.estimates.trace import Trace
        >>> history = SharpnessHistory("Hessian")
        >>> for step, value in (0, 12.5), (100, 17.25):
        ...     trace = Trace(10, "samples", "Hessian", value, 0.5, torch.zeros(10), "hutchinson", 82)
        ...     history = history.with_entry(step, trace=trace, loss=1.0 / (step + 1), lr=0.1)
        >>> print(history)
        sharpness of Hessian over training
          step      loss         trace  2 / lr
          0            1   12.5 +- 0.5      20
          100   0.009901  17.25 +- 0.5      20
    """

    matrix: str
    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    values: Tensor = field(default_factory=lambda: torch.zeros(0, 0, **HOST))
    value_errors: Tensor = field(default_factory=lambda: torch.zeros(0, 0, **HOST))
    traces: Tensor = field(default_factory=_empty)
    trace_errors: Tensor = field(default_factory=_empty)
    losses: Tensor = field(default_factory=_empty)
    lrs: Tensor = field(default_factory=_empty)

    def __post_init__(self) -> None:
        lengths = [len(column) for column in (self.steps, *self._columns)]
        if len(set(lengths)) > 1:
            raise ValueError(f"the columns of a history have {lengths} entries. Give one for each step; nan: unknown.")

    def with_entry(
        self,
        step: int,
        eigenpairs: Eigenpairs | None = None,
        trace: Trace | None = None,
        loss: float | None = None,
        lr: float | None = None,
    ) -> SharpnessHistory:
        """A new history, with one entry more. This one stays as it is.

        Args:
            step: of training; after the last entry's.
            eigenpairs: of this matrix. Their number may differ between entries.
            trace: of this matrix.
            loss: at that step.
            lr: learning rate at that step, for the line 2 / lr.

        Raises:
            TypeError: the step is no whole number, the loss or lr no number, or the eigenpairs or the trace are none.
            ValueError: the step is not after the last one, or the eigenpairs or the trace are of another matrix.
        """
        step = check_count("step", step, least=0)
        for name, result, kind in ("eigenpairs", eigenpairs, Eigenpairs), ("trace", trace, Trace):
            if result is None:
                continue
            if not isinstance(result, kind):
                raise TypeError(f"{name} is {shown(result)}. Give a result of class {kind.__name__}, or None.")
            if result.matrix != self.matrix:
                raise ValueError(
                    f"results of {result.matrix} are no entry of a history of {self.matrix}. Begin another history: "
                    f"SharpnessHistory({result.matrix!r})."
                )
        if len(self.steps) and step <= int(self.steps[-1]):
            raise ValueError(
                f"step {step} is not after the last one, {int(self.steps[-1])}. If the training went back to an "
                f"earlier step, go on from history.before({step})."
            )
        values = _empty() if eigenpairs is None else eigenpairs.values
        errors = _empty() if eigenpairs is None else eigenpairs.error_bounds
        return SharpnessHistory(
            matrix=self.matrix,
            steps=torch.cat([self.steps, torch.tensor([step], device="cpu")]),
            values=rows([*self.values, values]),
            value_errors=rows([*self.value_errors, errors]),
            traces=_extended(self.traces, "trace", None if trace is None else trace.value),
            trace_errors=_extended(self.trace_errors, "trace's error", None if trace is None else trace.stderr),
            losses=_extended(self.losses, "loss", loss),
            lrs=_extended(self.lrs, "lr", lr),
        )

    def before(self, step: int) -> SharpnessHistory:
        """A new history, of the entries before that step."""
        is_before = self.steps < check_count("step", step, least=0)
        return SharpnessHistory(self.matrix, self.steps[is_before], *(column[is_before] for column in self._columns))

    def lines(self) -> Iterator[str]:
        yield f"sharpness of {self.matrix} over training"
        columns = [column("loss", self.losses), *starmap(column, self._curves()), column(_EDGE, self._edge)]
        measured = [cells for cells in columns if set(cells[1:]) - {"-"}]
        yield from table(list(zip(["step", *map(str, self.steps.tolist())], *measured, strict=True)))

    def draw(self, ax: Any) -> None:
        """Eigenvalues and traces with error bars over steps, and 2 / lr dashed. Traces make the axis logarithmic."""
        for head, values, errors in self._curves():
            measured = values.isfinite()
            if bool(measured.any()):
                points = self.steps[measured].tolist(), values[measured].tolist(), or_zero(errors[measured]).tolist()
                ax.errorbar(*points, fmt="o-", markersize=3, label=head)
        measured = self._edge.isfinite()
        if bool(measured.any()):
            ax.plot(self.steps[measured].tolist(), self._edge[measured].tolist(), "k--", label=_EDGE)
        if bool(self.traces.isfinite().any()):
            symlog(ax, "y", self.values, self.traces)
        ax.set_xlabel("step")
        ax.set_ylabel(f"of {self.matrix}")
        if ax.get_legend_handles_labels()[1]:
            ax.legend()

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return self.values, self.value_errors, self.traces, self.trace_errors, self.losses, self.lrs

    def _curves(self) -> Iterator[Curve]:
        return curves(self.values, self.value_errors, self.traces, self.trace_errors)

    @property
    def _edge(self) -> Tensor:
        """[entries]: the top eigenvalue above which a step of gradient descent makes things worse."""
        return 2.0 / self.lrs


_EDGE = "2 / lr"


def _extended(column: Tensor, name: str, value: float | None) -> Tensor:
    return torch.cat([column, torch.tensor([math.nan if value is None else check_number(name, value)], **HOST)])
