"""The errors that a call can raise, each with a type of its own.

    ValueError, TypeError   an argument is wrong: found by validation, before anything runs
    CheckpointError         a chunk cannot be recomputed as it was computed
    StuckError              no lane can go on
    MismatchError           the ranks do not make the same call (distributed/agreement.py)
    RankError               another rank failed in a way that has no type here, or went silent (distributed/failure)

Whatever a layer or a loss raises keeps its own type; a note names the action it was raised in."""

from __future__ import annotations

PLAIN = "the plain module (the model that was cut, or pipe.to_sequential())"  # in errors: what to give to other tools


def message_of(error: BaseException) -> str:
    """An error's message, also of one of the user's whose `__str__` fails: that must not hide the error itself."""
    try:
        return str(error)
    except Exception as why:
        return f"(its message cannot be had: {type(why).__name__})"


class CheckpointError(RuntimeError):
    """A recomputation would not repeat its forward: something that it reads has changed in between."""


class DroppedError(CheckpointError):
    """A layer called autograd within a forward that saves nothing. The stage then runs it again, saving."""


class StuckError(RuntimeError):
    """Every lane that still has actions waits for an action that no lane runs."""
