"""A rank's failure as text that crosses ranks, and the exception that the other ranks raise for it.

    rank 2: ValueError --of_exception--> Failure --> JSON ══► Failure --exception_of--> ValueError

An error crosses as text: its type's name, its message, its traceback. The other side makes the same type from the
message where it can; else, and where no rank raised (one went silent), it is a RankError. Nothing is unpickled.
"""

from __future__ import annotations

import ast
import traceback as tracebacks
from pkgutil import resolve_name
from typing import NamedTuple

from pipeline.common.errors import message_of
from scheduler.action import Action

LONGEST_MESSAGE = 20_000  # characters: a tensor printed in full must not fill the store
LONGEST_TRACEBACK = 40_000  # of which the end is kept, where the error was raised


class RankError(RuntimeError):
    """A failure of another rank whose own type cannot be made here, or of the connection."""


class Failure(NamedTuple):
    """The description of one rank's failure that every rank gets.

    Args:
        rank: the rank that failed or is silent.
        place: in what ("stage 2, chunk 3, 2F3, "); "" outside of actions.
        call: the call it happened in ("step 7").
        type_name: the type's module and name ("builtins.ValueError").
        message: `str` of the error.
        traceback: as Python prints it; empty where nothing was raised.
        waits: where each rank waited, if the failure is a silence.

    >>> Failure(2, "stage 1, chunk 3, 1F3, ", "step 7", "builtins.ValueError", "not like this")
    Failure(rank=2, place='stage 1, chunk 3, 1F3, ', call='step 7', type_name='builtins.ValueError', \
message='not like this', traceback='', waits='')
    """

    rank: int
    place: str
    call: str
    type_name: str
    message: str
    traceback: str = ""
    waits: str = ""


def of_exception(error: BaseException, rank: int, call: str, action: Action | None = None) -> Failure:
    """The Failure for `error`, which was raised on `rank`, during an action or outside of one."""
    message = message_of(error)
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]}... ({len(message) - LONGEST_MESSAGE} more characters)"
    text = "".join(tracebacks.format_exception(error))
    place = "" if action is None else f"stage {action.stage}, chunk {action.chunk}, {action}, "
    return Failure(rank, place, call, _name(type(error)), message, text[-LONGEST_TRACEBACK:])


def silence(rank: int, call: str, message: str, waits: str = "") -> Failure:
    """A failure without an exception: a rank that does not answer, a connection that is closed."""
    return Failure(rank, "", call, _name(RankError), message, waits=waits)


def exception_of(failure: Failure, own_rank: int) -> BaseException:
    """The exception that rank `own_rank` raises for this failure.

    Returns:
        An error of the original's type, if that can be imported here, is an Exception and can be made from its message;
        a RankError otherwise. A note says where it happened, and the cause holds the traceback of the rank that raised.

    >>> error = exception_of(Failure(2, "stage 1, chunk 3, 1F3, ", "step 7", "builtins.ValueError", "not like this"), 0)
    >>> error, error.__notes__
    (ValueError('not like this'), ['on rank 2: stage 1, chunk 3, 1F3, in step 7'])
    """
    error = _original_error(failure) or RankError(_rank_error_message(failure))
    error.add_note(f"on rank {failure.rank}: {failure.place}in {failure.call}")
    if failure.traceback:
        origin = "here, too" if failure.rank == own_rank else f"this is rank {own_rank}"
        error.__cause__ = RankError(f"on rank {failure.rank} ({origin}):\n\n{failure.traceback}")
    return error


def _name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _rank_error_message(failure: Failure) -> str:
    """The message of a RankError."""
    message = failure.message
    if failure.type_name != _name(RankError):
        message = f"{failure.type_name.removeprefix('builtins.')}: {message}"
    return f"{message} {failure.waits}" if failure.waits else message


def _original_error(failure: Failure) -> Exception | None:
    """The original's type, made from its message, if that gives an error that says the same."""
    cls = _exception_type(failure.type_name)
    if cls is None or cls is RankError:
        return None
    try:
        error = cls(*_arguments(cls, failure.message))
        return error if isinstance(error, Exception) and failure.message in str(error) else None
    except Exception:  # it needs other arguments (UnicodeDecodeError needs five), or refuses this one
        return None


def _arguments(cls: type[Exception], message: str) -> tuple[object, ...]:
    """The arguments for the type's constructor. `str` of a KeyError is the `repr` of its key."""
    if not message:
        return ()
    if cls.__str__ is KeyError.__str__:
        try:
            return (ast.literal_eval(message),)
        except (ValueError, SyntaxError):
            pass
    return (message,)


def _exception_type(type_name: str) -> type[Exception] | None:
    """The type of that name. Its module may have dots, and so may its name within (a class within a class)."""
    try:
        candidate = resolve_name(type_name)
    except (Exception, SystemExit):  # an import can run any code
        return None
    return candidate if isinstance(candidate, type) and issubclass(candidate, Exception) else None
