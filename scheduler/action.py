"""What is the smallest piece of work that a schedule speaks of?

    Action(stage=2, kind=F, chunk=0)  --str-->  "2F0"  --Action.parse-->  Action(stage=2, kind=F, chunk=0)

    kind  work on one chunk in one stage                needs                     gives
    F     forward                                       the stage's input         the stage's output
    B     backward = I + W                              gradient of the output    gradient of the input, of the weights
    I     the input's half of the backward              gradient of the output    gradient of the input
    W     the weights' half of the backward             what I kept               gradient of the weights

The zero-bubble papers (Qi et al. 2023, arXiv 2401.10241) write "B" for what is I here; here B is always the whole
backward. Nothing else in this package repeats the difference.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from scheduler.errors import ScheduleError

__all__ = ["Action", "Kind"]


class Kind(StrEnum):
    """What an action does: one of the four rows of the table above."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the word that the whole project uses
    W = "W"

    @property
    def is_backward(self) -> bool:
        """Whether this kind makes the gradient of a stage's input, which the stage before waits for: B and I.

        >>> [str(kind) for kind in Kind if kind.is_backward]
        ['B', 'I']
        """
        return self is Kind.B or self is Kind.I


class Action(NamedTuple):
    """One piece of work: `kind`, for chunk `chunk`, in stage `stage`.

    >>> str(Action(2, Kind.F, 0))
    '2F0'
    >>> Action.parse("2F0")
    Action(stage=2, kind=<Kind.F: 'F'>, chunk=0)
    """

    stage: int
    kind: Kind
    chunk: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Reads what `str` wrote, and nothing else.

        Args:
            text: stage, kind and chunk without spaces, such as "2F0"

        Returns:
            The action, such that `str(Action.parse(text)) == text`.

        Raises:
            ScheduleError: `text` is anything else ("2F0xyz", "F0", "02F0", "2X0").
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, kind and chunk without spaces, as in 2F0; "
                f"the kinds are {', '.join(Kind)}."
            )
        stage, kind, chunk = match.groups()
        return cls(int(stage), Kind(kind), int(chunk))


_TEXT = re.compile(r"(0|[1-9][0-9]*)([FBIW])(0|[1-9][0-9]*)")
