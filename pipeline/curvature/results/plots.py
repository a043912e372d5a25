"""The common part of all plots: new axes, names of files, and scales for values of any size.

matplotlib is imported when a picture is asked for, and not before. A figure that goes to a file never meets a window
system: it is made without pyplot, whose back end stays as it was.
"""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.common.arguments import check_path
from pipeline.curvature.results.resultfile import ResultError
from scheduler.plotting import matplotlib


def check_suffix(path: str | PathLike[str]) -> None:
    """Raise ResultError for a file that no picture can go to."""
    check_path("the path of the picture", path)
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ResultError(f"a picture goes to a file named *.png, *.svg or *.pdf (path: {path})")


def new_axes(inches: tuple[float, float], on_screen: bool = False) -> Any:
    """Axes of a new figure, of a width and a height.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if on_screen:
        return matplotlib("pyplot").subplots(figsize=inches, layout="constrained")[1]
    return matplotlib("figure").Figure(figsize=inches, layout="constrained").subplots()


def symlog(ax: Any, axis: str, *drawn: Tensor) -> None:
    """Makes an axis logarithmic in both directions from 0, so that 600 and -0.03 are both seen.

    Args:
        axis: "x" or "y".
        drawn: the values. About a thousandth of the largest finite one, and less, is drawn linearly.
    """
    largest = max((float(or_zero(values).abs().max()) for values in drawn if values.numel()), default=0.0)
    if largest > 0.0:
        linear = 10.0 ** math.floor(math.log10(largest) - 2.5)  # of other than powers of ten the labels overlap
        getattr(ax, f"set_{axis}scale")("symlog", linthresh=linear)


def or_zero(values: Tensor) -> Tensor:
    """With 0 for what is not finite: an error that nobody knows has no bar."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
