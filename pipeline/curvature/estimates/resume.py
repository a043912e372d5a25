"""Resumption of an interrupted run, on every process from the same step.

    every few minutes, and on any exception:   state --> path.part --os.replace--> path        one file a process
    over several processes                      path --> path.before first, so that two steps are on the disk

    at the start:  files --> steps of each process --all to all--> the latest step that all have --> state

A state is recorded by reference after each product. What writes to it raises the version of a tensor, as autograd
counts them: then it is no state any more, and the file keeps an earlier one.

Files are written by `torch.save` and read with `weights_only`: tensors, numbers and text, no code.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from pipeline.common.arguments import check_flags, check_number, check_path
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.resultfile import replacing
from pipeline.curvature.space import Space, Vec
from pipeline.data.pytrees import versions

SavedValue: TypeAlias = Any  # tensors, numbers, text, None, and lists, tuples and dicts of them


class ResumeError(ValueError):
    """A run cannot go on from a file, or cannot be saved there."""


class RunFiles:
    """The files of one run on this process.

    Args:
        path: with `.rank{r}of{n}` put before its suffix where several processes share the vectors.
        settings: what makes it this run and no other: all must be as they were.
        every: seconds between two saves; 0 saves at each step.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> H = Hessian(nn.Linear(2, 1), (torch.ones(4, 2), torch.ones(4, 1)), nn.functional.mse_loss)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = RunFiles(f"{folder}/run.pt", H.space, {"seed": 0})
        ...     print(saves.latest())
        ...     saves.write(7, {"sum": 1.5})
        ...     print(saves.latest())
        None
        {'sum': 1.5}
    """

    def __init__(
        self, path: str | os.PathLike[str], space: Space, settings: Mapping[str, SavedValue], every: float = 300.0
    ) -> None:
        self.path = file_of_rank(checked_path(path), space.rank, space.ranks)
        self.before = self.path.with_name(self.path.name + ".before")
        self._space, self._settings = space, dict(settings)
        self._every = check_number("save_every", every)
        self._written = time.monotonic()

    def latest(self) -> SavedValue | None:
        """The state of the latest step that all processes have; None if no process has any. All call it.

        Raises:
            ResumeError: a file is of other settings or cannot be read, or no step is on all processes.
        """
        states, refusal = {}, None
        try:
            if not self.path.parent.is_dir():  # now, and not after minutes at the first save
                raise ResumeError(f"{self.path.parent} is no folder: make it, so that the run can be saved in it.")
            files = self._read(self.before), self._read(self.path)
            states = {saved["step"]: saved["state"] for saved in files if saved}
        except ResumeError as error:
            refusal = error
        steps = self._common_steps(sorted(states), refusal)
        return states[max(steps)] if steps else None

    def due(self) -> bool:
        """Whether it is time to save: rank 0's clock decides for all. All call it."""
        return bool(self._space.rows(time.monotonic() - self._written >= self._every)[0])

    def write(self, step: int, state: SavedValue) -> ResumeError | None:
        """Save the state after a step, or say why it cannot be. A process that dies meanwhile leaves the last file
        whole."""
        try:
            with replacing(self.path, ".part") as file:
                on_host = tree_map_only(Tensor, Tensor.cpu, state)
                torch.save({"settings": self._settings, "step": step, "state": on_host}, file)
                if self._space.ranks > 1 and self.path.exists() and self._step_of(self.path) != step:
                    os.replace(self.path, self.before)
        except (OSError, RuntimeError) as error:  # where the disk is full, torch's writer raises one of its own
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            return ResumeError(f"the run's state could not be saved at {self.path}: {reason}")
        self._written = time.monotonic()
        return None

    def save(self, step: int, state: SavedValue) -> None:
        """Save the state after a step on all processes; all raise if one cannot. All call it."""
        self._agree(self.write(step, state))

    def remove(self) -> None:
        """The run is done: nothing is to be gone on from."""
        self.path.unlink(missing_ok=True)
        self.before.unlink(missing_ok=True)

    def rescue(self, step: int, state: SavedValue, error: BaseException) -> None:
        """Save what was reached, and tell with the error where it is; a failure to do so does not hide the error."""
        failure = self.write(step, state)
        if failure is None:
            error.add_note(f"The run's state after {step} products is in {self.path}: call again to go on.")
        elif str(failure) != str(error):  # a save now and then has failed in the same way
            error.add_note(str(failure))

    def _read(self, path: Path) -> dict[str, SavedValue] | None:
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch would read what a disk has changed
            if damaged is not None:
                raise ValueError(f"{damaged} is not as it was written")
            saved: dict[str, SavedValue] = torch.load(path, map_location="cpu", weights_only=True)
            settings = saved["settings"]
        except Exception as error:  # zipfile, pickle and torch say in many types that a file is not theirs, or damaged
            raise ResumeError(
                f"{path} cannot be read as the state of a run ({type(error).__name__}: {str(error)[:200]}). "
                "Delete it to begin anew, or give another path to resume."
            ) from error
        if settings != self._settings:
            raise ResumeError(
                f"{path} is the state of another run: {', '.join(_changes(settings, self._settings))}. "
                "Call with what it was to go on, or delete the file, or give another path to resume."
            )
        return saved

    def _step_of(self, path: Path) -> int:
        return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["step"])

    def _common_steps(self, own_steps: list[int], refusal: ResumeError | None) -> set[int]:
        """The steps that all processes have; all raise if one has to."""
        steps = list(map(set, self._agree(refusal, own_steps)))
        common = set.intersection(*steps)
        if any(steps) and not common:
            listing = "; ".join(
                f"rank {rank} has {' and '.join(map(str, sorted(rank_steps))) or 'none'}"
                for rank, rank_steps in enumerate(steps)
            )
            raise ResumeError(
                f"no step of the run is on all processes ({listing}), files like {self.path}. Put back the file that "
                "is missing, or delete them all to begin anew."
            )
        return common

    def _agree(self, refusal: ResumeError | None, value: Any = None) -> list[Any]:
        """The values of all processes; all raise if one has to."""
        rows = self._space.rows([refusal is not None, value])
        if refusal is not None:
            raise refusal
        refusing = [rank for rank, (refuses, _) in enumerate(rows) if refuses]
        if refusing:
            raise ResumeError(f"rank {refusing[0]} cannot go on with its file, so that no rank can: see its error.")
        return [rank_value for _, rank_value in rows]


class Resumable:
    """A run of an estimator: within, a bar shows how far it is, and its state is saved now and then, and at an
    exception; then removed. All processes make it.

    tqdm draws the bar, on stderr, if it is installed.

    Args:
        A: the matrix.
        title: of the bar: "trace of Hessian".
        total: the number of products. None: nobody knows.
        settings: of the run, besides the matrix.
        show: whether to show the bar, on one process. None: where it goes to a terminal.
        resume: the file, or None: nothing is saved.
        save_every: seconds.

    Attributes:
        saved_state: the state to go on from, or None.
        is_done: whether the file is removed at the end; else it is kept for a call that goes on.

    Raises:
        MismatchError: the settings differ between processes.
        ResumeError: the file is of another run, or cannot be read.

    Example:
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> H = Hessian(nn.Linear(2, 1), (torch.ones(4, 2), torch.ones(4, 1)), nn.functional.mse_loss)
        >>> with Resumable(H, "trace of Hessian", 10, show=False) as run:
        ...     run.record(4, {"values": [1.5]}, note="638 +- 12")
    """

    def __init__(
        self, A: LinearMap, title: str, total: int | None, settings: Mapping[str, SavedValue] = {},
        show: bool | None = None, resume: str | os.PathLike[str] | None = None, save_every: float = 300.0,
    ) -> None:  # fmt: skip
        if show is not None:
            check_flags(show=show)
        A.space.check_same(settings)
        settings = {} if resume is None else {**settings_of(A), **settings}
        self._saves = None if resume is None else RunFiles(resume, A.space, settings, save_every)
        self.saved_state: SavedValue | None = None if self._saves is None else self._saves.latest()
        self._shows = A.space.rank == 0 and (sys.stderr.isatty() if show is None else show)
        self._title, self._total, self._bar, self._step = title, total, None, 0
        self._recorded: tuple[int, SavedValue, tuple[int, ...]] | None = None  # step, state, versions of its tensors
        self.is_done = True
        self._counting_writes = torch.inference_mode(False)

    def __enter__(self) -> Self:
        self._counting_writes.__enter__()
        self._bar = _bar(self._total, self._title) if self._shows else None
        return self

    def record(self, step: int, state: SavedValue, note: str = "") -> None:
        """Note the number of products so far, and the state then.

        Args:
            state: by reference. It can be saved until one of its tensors is written.
            note: see `advance`.
        """
        advance, self._step = step - self._step, step
        self.advance(advance, note)
        if self._saves is not None:
            state = tree_map(lambda leaf: leaf, state)  # in containers of its own
            self._recorded = step, state, _versions(state)
            if advance and self._saves.due():
                self._saves.save(step, state)

    def advance(self, products: int, note: str = "") -> None:
        """Move the bar. A note replaces the one at its right, an empty one leaves it."""
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=not products)
            self._bar.update(products)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counting_writes.__exit__(kind, error, trace)
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._saves is None:
            return
        if error is None and self.is_done:
            self._saves.remove()
        elif self._recorded is not None:
            step, state, recorded_versions = self._recorded
            if _versions(state) != recorded_versions:
                return
            if error is None:
                self._saves.save(step, state)
            else:
                self._saves.rescue(step, state, error)


def _versions(state: SavedValue) -> tuple[int, ...]:
    """The counts that autograd keeps of writes to the tensors of a state."""
    return versions([leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)])


def _bar(total: int | None, title: str) -> Any:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=title, file=sys.stderr, dynamic_ncols=True)


def settings_of(A: LinearMap) -> dict[str, SavedValue]:
    """The traits of a matrix that must be the same for a run with it to go on."""
    sizes = [len(shard) for shard in A.space.zeros()]  # a state fits only the same cut
    space = {"dtype": str(A.space.dtype), "shards": sizes, "rank": f"{A.space.rank} of {A.space.ranks}"}
    return {"matrix": A.name, "fingerprint": A.fingerprint(), **space}


def from_host(space: Space, vecs: Sequence[Sequence[Tensor]]) -> list[Vec]:
    """Vectors of a state."""
    targets = space.zeros()
    return [[shard.to(target, copy=True) for shard, target in zip(vec, targets, strict=True)] for vec in vecs]


def checked_path(path: object) -> Path:
    """The path of the file from which a run goes on.

    Raises:
        TypeError: it is no path.
        ResumeError: it names no file.
    """
    check_path("resume", path)
    file = Path(cast("str | os.PathLike[str]", path))
    if not file.name:
        raise ResumeError(f"resume is {str(path)!r}, which names no file. Give one, such as 'run.pt'.")
    return file


def file_of_rank(path: Path, rank: int, ranks: int) -> Path:
    """The file of one process's part.

    Example:
        >>> file_of_rank(Path("top.pt"), 1, 4).name, file_of_rank(Path("top.pt"), 0, 1).name
        ('top.rank1of4.pt', 'top.pt')
    """
    return path if ranks == 1 else path.with_name(f"{path.stem}.rank{rank}of{ranks}{path.suffix}")


def _changes(saved: Mapping[str, SavedValue], current: Mapping[str, SavedValue]) -> list[str]:
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    return [f"{name} was {_short(saved.get(name))} and is {_short(current.get(name))}" for name in names]


def _short(value: SavedValue) -> str:
    text = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
