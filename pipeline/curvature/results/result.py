"""The base class of results: printed for people, saved to files and loaded, plotted.

    Trace(value=638.3, ...) --print--> lines()         --plot--> draw() on matplotlib's axes
                            --save---> run.npz | run.json --load--> an equal Trace

A result knows its fields, its lines and its picture; files and figures are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from io import StringIO
from os import PathLike
from typing import Any, Self, TypeAlias

from pipeline.common.arguments import shown
from pipeline.curvature.results import plots, resultfile
from pipeline.curvature.results.resultfile import ResultError
from scheduler.notebook import NotebookResult

FilePath: TypeAlias = "str | PathLike[str]"


@dataclass(frozen=True, eq=False)
class Result(NotebookResult):
    """The result of an estimator. Frozen; its tensors are on the CPU.

    A result knows nothing of ranks. Where each process has a part of its own (vectors, diagonals), each saves it under
    a name of its own: `found.save(f"top.rank{rank}.npz")`. What is the same on all processes, one of them saves.

    Example:
        >>> import tempfile, torch
        >>> @dataclass(frozen=True, eq=False)
        ... class Extremes(Result):
        ...     values: torch.Tensor
        ...     def lines(self):
        ...         yield f"from {self.values.min():g} to {self.values.max():g}"
        >>> found = Extremes(torch.tensor([3.0, 1.0, 2.0]))
        >>> print(found)
        from 1 to 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found.save(f"{folder}/extremes.json")
        ...     Result.load(f"{folder}/extremes.json")
        <Extremes: from 1 to 3>
    """

    def __init_subclass__(cls) -> None:
        # @dataclass would write a __repr__ with every number of every tensor, but leaves one alone that is there.
        if "__repr__" not in vars(cls):
            setattr(cls, "__repr__", Result.__repr__)

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The lines that print shows."""

    def draw(self, ax: Any) -> None:
        """The picture, on matplotlib's axes."""
        raise ResultError(f"{type(self).__name__} has no picture. Print it, or plot its fields yourself.")

    def inches(self) -> tuple[float, float]:
        """Width and height of the picture, where the result makes the figure."""
        return 6.4, 4.8

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {next(iter(self.lines()), '').strip()}>"

    def _picture(self) -> str | None:
        if type(self).draw is Result.draw:
            return None
        try:
            ax = plots.new_axes(self.inches())
            self.draw(ax)
        except (ImportError, ResultError):
            return None
        text = StringIO()
        ax.get_figure(root=True).savefig(text, format="svg")
        return text.getvalue()

    def save(self, path: FilePath) -> None:
        """Writes all fields to a file, without loss. A file of that name is replaced, at the end and at once.

        Args:
            path: `*.npz`, where numpy.load finds each tensor under its field's name; or `*.json`, which people and
                other languages read, for small results: 20 bytes a number.

        Raises:
            ResultError: another suffix; or a field holds what a file cannot.
            FileNotFoundError: the folder is not there.
        """
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        resultfile.write_result(path, type(self).__name__, type(self).__module__, named)

    @classmethod
    def load(cls, path: FilePath) -> Self:
        """Reads what `save` wrote. No code in a file is run: a file from anywhere may be opened.

        Args:
            path: `*.npz` or `*.json`. `Result.load` gives whatever result it holds; `Trace.load` a Trace or an error.

        Raises:
            ResultError: it is no such file, holds another class, or was written by a newer version.
            FileNotFoundError: there is none.
        """
        name, module, named = resultfile.read_result(path)
        kind = _class_named(name, module, path)
        if not issubclass(kind, cls):
            raise ResultError(f"{path} holds a {name}, no {cls.__name__}: use {name}.load, or Result.load for any.")
        try:
            result = kind(**named)
            str(result)  # which takes fields of other kinds, or other numbers of them, for none
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ResultError(
                f"{path} does not have the fields of a {name} of this version ({error}). Load it with the version that "
                "wrote it."
            ) from error
        return result

    def plot(self, path: FilePath | None = None, ax: Any = None) -> Any:
        """Draws the result with matplotlib.

        Args:
            path: a `.png`, `.svg` or `.pdf` file to write. Without it, `matplotlib.pyplot.show()` shows the figure.
            ax: axes to draw on; new ones if None.

        Returns:
            The axes.

        Raises:
            TypeError: `ax` is no axes.
            ResultError: the result has no picture, or the path another suffix.
            ImportError: matplotlib is not installed.
        """
        if type(self).draw is Result.draw:
            self.draw(ax)
        if path is not None:
            plots.check_suffix(path)
        if ax is None:
            ax = plots.new_axes(self.inches(), on_screen=path is None)
        elif not hasattr(ax, "get_figure"):
            raise TypeError(f"ax is {shown(ax)}. Give axes of matplotlib, one of plt.subplots(), or None for new ones.")
        self.draw(ax)
        if path is not None:
            ax.get_figure(root=True).savefig(path)
        return ax


def _class_named(name: str, module: str, path: FilePath) -> type[Result]:
    """The class of that name; if two have it, the one of that module. Nothing is imported for it."""
    named = [kind for kind in _subclasses(Result) if kind.__name__ == name]
    of_module = [kind for kind in named if kind.__module__ == module]
    if not (of_module or len(named) == 1):
        raise ResultError(f"{path} holds a {name} of {module}, which is not known here. Import {module} first.")
    return (of_module or named)[-1]


def _subclasses(parent: Any) -> Iterator[type[Result]]:
    for subclass in parent.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
