"""Errors cross ranks: what type, what words, what they never do."""

import json
import pickle
import sys
import types
from typing import Any

import pytest
import torch

from pipeline.distributed.failure.errors import (
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    Failure,
    RankError,
    exception_of,
    of_exception,
    silence,
)
from scheduler.action import Action


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def over(record: Failure) -> Failure:
    """As the store has it."""
    return Failure(*json.loads(json.dumps(record)))


def crossed(error: BaseException) -> BaseException:
    """What rank 0 raises when rank 2 raised this."""
    record = of_exception(raised(error), 2, "step 7", Action.parse("2F3"))
    return exception_of(over(record), 0)


class OneArgumentError(ValueError):
    pass


class WordyError(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(f"it is {what}")


class TwoArgumentsError(Exception):
    def __init__(self, what: str, how: str) -> None:
        super().__init__(f"{what} is {how}")


class MuteError(Exception):
    def __init__(self, what: str) -> None:
        super().__init__()

    def __str__(self) -> str:
        return "always the same"


class RefusingError(Exception):
    def __init__(self, what: Any) -> None:
        if isinstance(what, str):
            raise LookupError("no text, please")
        super().__init__(f"number {what}")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Outer:
    class InnerError(RuntimeError):
        pass


class OddKeyError(KeyError):
    pass


SAME = [
    ValueError("not like this"),
    ValueError(),
    ValueError(""),
    TypeError("a\nb"),
    AssertionError("x"),
    StopIteration("x"),
    OSError(2, "No such file or directory"),
    FileNotFoundError(2, "No such file or directory", "a file"),
    KeyError("x"),
    KeyError("it's"),
    KeyError(3),
    KeyError((1, "a")),
    OddKeyError("y"),
    UserWarning("w"),
    NotImplementedError("a" * 1000),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    torch.linalg.LinAlgError("singular"),
    OneArgumentError("mine"),
    Outer.InnerError("deep"),
    pickle.PicklingError("of a module"),
    RuntimeError("lone \udc80 surrogate, \0 and ☃"),
]


@pytest.mark.parametrize("error", SAME, ids=repr)
def test_an_error_that_can_be_made_from_its_message_crosses_as_itself(error: Exception) -> None:
    found = crossed(error)
    assert type(found) is type(error)
    assert str(found) == str(error)


@pytest.mark.parametrize("error", [KeyError("x"), KeyError(3), KeyError((1, "a")), KeyError("'x'")], ids=repr)
def test_the_key_of_a_key_error_crosses(error: KeyError) -> None:
    assert crossed(error).args == error.args


def test_of_an_error_that_formats_its_argument_the_message_is_held() -> None:
    found = crossed(WordyError("wet"))
    assert type(found) is WordyError
    assert "it is wet" in str(found)


LOCAL = type("LocalError", (Exception,), {"__qualname__": "f.<locals>.LocalError"})
OTHER = [
    (TwoArgumentsError("grass", "green"), "TwoArgumentsError: grass is green"),
    (MuteError("x"), None),
    (RefusingError(3), "RefusingError: number 3"),
    (raised(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")), "UnicodeDecodeError: 'utf-8' codec can't decode byte"),
    (ExceptionGroup("many", [ValueError("one")]), "ExceptionGroup: many"),
    (LOCAL("x"), "LocalError: x"),
    (KeyboardInterrupt(), "KeyboardInterrupt: "),
    (SystemExit(3), "SystemExit: 3"),
    (GeneratorExit("x"), "GeneratorExit: x"),
]


@pytest.mark.parametrize("error, words", [pair for pair in OTHER if pair[1]], ids=repr)
def test_any_other_error_crosses_as_a_rank_error_that_names_its_type(error: BaseException, words: str) -> None:
    found = crossed(error)
    assert type(found) is RankError
    assert words in str(found)


def test_a_message_that_the_type_would_not_say_is_not_lost() -> None:
    record = of_exception(raised(MuteError("x")), 1, "step 1")._replace(message="something else")
    found = exception_of(record, 0)
    assert type(found) is RankError
    assert "MuteError: something else" in str(found)


def test_builtins_are_named_without_their_module_and_others_with_it() -> None:
    assert str(crossed(SystemExit(3))).startswith("SystemExit: 3")
    assert str(crossed(RefusingError(3))).startswith(f"{__name__}.RefusingError: ")


def test_an_error_whose_message_cannot_be_had_still_crosses() -> None:
    found = crossed(UnprintableError())
    assert type(found) is RankError
    assert "UnprintableError: (its message cannot be had: ZeroDivisionError)" in str(found)


def test_an_error_of_a_type_that_is_not_there_is_a_rank_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("of_the_other_rank")
    module.GoneError = type("GoneError", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record = of_exception(raised(module.GoneError("x")), 1, "step 1")
    assert type(exception_of(record, 0)) is module.GoneError
    monkeypatch.delitem(sys.modules, module.__name__)
    found = exception_of(record, 0)
    assert type(found) is RankError
    assert str(found) == "of_the_other_rank.GoneError: x"


@pytest.mark.parametrize("name", ["builtins.print", "builtins.int", "builtins.KeyboardInterrupt", "sys.path", "x", ""])
def test_a_name_that_is_not_of_an_exception_is_never_called(name: str) -> None:
    found = exception_of(Failure(1, "", "step 1", name, "1"), 0)
    assert type(found) is RankError


def test_a_module_is_imported_for_its_error_and_one_that_cannot_be_does_no_harm(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "errors_of_users.py").write_text("class UserError(Exception): pass\n")
    (tmp_path / "ends_at_import.py").write_text("raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = exception_of(Failure(1, "", "step 1", "errors_of_users.UserError", "u"), 0)
    assert f"{type(found).__module__}.{type(found).__name__}: {found}" == "errors_of_users.UserError: u"
    assert type(exception_of(Failure(1, "", "step 1", "ends_at_import.UserError", "u"), 0)) is RankError
    monkeypatch.delitem(sys.modules, "errors_of_users")


def test_a_note_says_where_and_in_what() -> None:
    assert crossed(ValueError("x")).__notes__ == ["on rank 2: stage 2, chunk 3, 2F3, in step 7"]
    found = exception_of(of_exception(ValueError("x"), 1, "evaluate (call 3)"), 0)
    assert found.__notes__ == ["on rank 1: in evaluate (call 3)"]


def test_the_cause_holds_the_traceback_of_the_rank_that_raised() -> None:
    for error in (ValueError("x"), SystemExit(3)):
        cause = crossed(error).__cause__
        assert type(cause) is RankError
        assert str(cause).startswith("on rank 2 (this is rank 0):\n\nTraceback (most recent call last):\n")
        assert "in raised\n    raise error" in str(cause)
        assert type(error).__name__ in str(cause).splitlines()[-1]


def test_causes_and_notes_of_the_original_are_in_the_traceback() -> None:
    error = ValueError("x")
    error.__cause__ = raised(LookupError("behind it"))
    error.add_note("in 2F3")
    text = str(crossed(error).__cause__)
    assert "LookupError: behind it" in text
    assert "in 2F3" in text


def test_a_silence_says_who_waits_and_has_no_traceback() -> None:
    record = silence(2, "step 7", "rank 2 does not answer.", "rank 0 is at 0B1 in step 7.")
    found = exception_of(over(record), 0)
    assert type(found) is RankError
    assert str(found) == "rank 2 does not answer. rank 0 is at 0B1 in step 7."
    assert found.__notes__ == ["on rank 2: in step 7"]
    assert found.__cause__ is None


def test_a_rank_error_that_was_raised_crosses_without_its_type_in_its_words() -> None:
    assert str(crossed(RankError("the connection to rank 1 was closed"))) == "the connection to rank 1 was closed"


def test_a_record_is_ascii_and_comes_back_as_it_was() -> None:
    record = Failure(1, "stage 0, chunk 1, 0F1, ", "step 1", "builtins.ValueError", 'ä"\\\n\udc80\0', "tb", "w")
    assert over(record) == record
    assert json.dumps(record).isascii() and "\0" not in json.dumps(record)


def test_a_message_or_a_traceback_as_long_as_a_book_is_cut_at_the_side_that_says_less() -> None:
    def deep(left: int) -> None:
        if left % 2:
            deep(left - 1)
        else:
            _other(left)

    def _other(left: int) -> None:
        if left == 0:
            raise ValueError("begins so" + "x" * 10**6 + "ends so")
        deep(left - 1)

    with pytest.raises(ValueError) as caught:
        deep(300)
    record = of_exception(caught.value, 0, "step 1")
    assert record.message.startswith("begins so")
    assert record.message.endswith(f"... ({10**6 + 16 - LONGEST_MESSAGE} more characters)")
    assert len(record.traceback) == LONGEST_TRACEBACK
    assert record.traceback.endswith("ends so\n")
    assert type(exception_of(record, 1)) is ValueError
