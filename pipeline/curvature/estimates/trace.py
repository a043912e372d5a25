"""The trace of a matrix that is known by its products only, with its standard error.

    hutchinson   mean of z . A z                          error of one vector / sqrt(vectors); nothing is held
    hutch++      exact on a sketch, Hutchinson elsewhere  much smaller where eigenvalues fall quickly; holds the sketch
    xtrace       every vector is sketch and probe         smaller yet; holds half as many vectors as products

Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines"; the
others are in hutchpp.py and xtrace.py. Where the samples are enough for a whole basis the trace is computed exactly.

There are two sketches, as each wins somewhere: XTrace for each product, Hutch++ for each vector held. Over seven
spectra of 200 eigenvalues XTrace's error was a 500th to 1.1 times that of Hutch++ for 60 products each. For 12 vectors
held, which are 24 products of XTrace but may be 60 of Hutch++, it was 1.5 to 6 times as large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.curvature.estimates.hutchpp import hutchpp
from pipeline.curvature.estimates.sampling import SampledNumber, SampleSize, estimate
from pipeline.curvature.estimates.xtrace import xtrace
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.tables import plus_minus

METHODS = ("hutchinson", "hutch++", "xtrace")


@dataclass(frozen=True, eq=False)
class Trace(SampledNumber):
    """A trace with its standard error.

    Args:
        method: that made it.
        size: how many rows the matrix has.
    """

    quantity = "trace"
    method: str
    size: int

    def lines(self) -> Iterator[str]:
        yield f"trace of {self.matrix}  {plus_minus(self.value, self.stderr)}"
        yield f"  {self.method}, {self.cost}"


def trace(
    A: LinearMap,
    samples: int = 100,
    *,
    method: str = "hutchinson",
    kind: str | None = None,
    sketch: int | None = None,
    rel: float | None = None,
    abs: float | None = None,
    min_samples: int = 10,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> Trace:
    """The trace of A, estimated without bias.

    With `samples` at least the size of A the trace is exact, by as many products as A has rows. Below 4 samples the
    other methods have no room for a sketch, and Hutchinson's takes their place.

    The standard error says how far off the value is, typically: within twice of it in about 19 of 20 runs, if draws
    are many; less often from fewer than ten, or, where one eigenvalue makes nearly all of the matrix, from fewer than a
    hundred. One draw says nothing of its error: it is then inf. With `rel` or `abs` the error is looked at after every
    block of products, and the run ends where it is small enough. That favours errors that are small by chance, and
    badly so among few draws: `min_samples` of them come before the first look.
    XTrace draws half as often as it multiplies, and its error is rather too large than too small; Hutch++ draws only
    after its sketch, two thirds of the samples.

    Args:
        A: the matrix; over ranks every process makes the same call.
        samples: the most products to spend.
        method: "hutchinson", "hutch++" or "xtrace".
        kind: of random vectors, "rademacher" or "normal". None: "normal" for XTrace, which needs them, else
            "rademacher", whose variance is smaller. The sketch of Hutch++ is always normal.
        rel: end where the standard error is at most this times the value's magnitude.
        abs: end where it is at most this. Of two bounds the looser one holds.
        min_samples: draws before the first look at the error.
        sketch: columns of the sketch of Hutch++, which are held in memory; None: a third of the samples.
        seed: of the random vectors; equal seeds give equal results.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Returns:
        the same numbers on every process.

    Raises:
        ValueError: an argument means nothing.
        FloatingPointError: a product is not finite.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> x = torch.randn(10, 2).double()
        >>> H = Hessian(model, (x, x.prod(1, keepdim=True)), nn.functional.mse_loss)
        >>> found, exact = trace(H, 20), trace(H, H.shape[0])
        >>> exact.stopped, abs(found.value - exact.value) < 4 * found.stderr
        ('exact', True)
    """
    chosen = _chosen_kind(method, kind, sketch)
    sampling = SampleSize(A, samples, chosen, rel, abs, min_samples, seed, show, resume, save_every)
    if sampling.is_exact or samples < 4:
        method = "hutchinson"
    if method == "hutchinson":
        drawn = estimate(sampling, lambda *pair: A.space.paired_dots(zip(*pair, strict=True)), "trace", method=method)
    else:
        with sampling.resumable("trace", method=method, sketch=sketch) as run:
            drawn = xtrace(sampling, run) if method == "xtrace" else hutchpp(sampling, run, sketch)
    spent, value, stderr = drawn.spent, float(drawn.mean), float(drawn.stderr)
    method = "basis" if spent == A.space.size else method
    return Trace(spent, drawn.stopped, A.name, value, stderr, drawn.values, method, A.space.size)


def _chosen_kind(method: str, kind: str | None, sketch: int | None) -> str:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: use one of {', '.join(map(repr, METHODS))}")
    if sketch is not None and method != "hutch++":
        raise ValueError(f"sketch is {sketch}, which is for method 'hutch++', not {method!r}: leave it out")
    if method == "xtrace" and kind not in (None, "normal"):
        raise ValueError(f"kind is {kind!r}: method 'xtrace' is without bias for kind 'normal' alone; leave it out")
    return kind or ("normal" if method == "xtrace" else "rademacher")
