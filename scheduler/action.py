"""An action: the smallest piece of work of a schedule.

    Action(stage=2, kind=F, chunk=0)  --str-->  "2F0"  --Action.parse-->  Action(stage=2, kind=F, chunk=0)
    Event(action, lane, start, end)   an action that ran

    kind    work on one chunk in one stage              needs                     gives
    F       forward                                     the stage's input         the stage's output
    B       backward = I + W                            gradient of the output    gradient of the input, of the weights
    I       the input's half of the backward            gradient of the output    gradient of the input
    W       the weights' half of the backward           what I kept               gradient of the weights

    SEND_F  the stage's output leaves its lane          F of this stage           a message
    RECV_F  the stage's input arrives                   SEND_F, one stage before  the stage's input
    SEND_B  the gradient of the stage's input leaves    B or I of this stage      a message
    RECV_B  the gradient of the stage's output arrives  SEND_B, one stage after   gradient of the output

    R       recomputation of what F did not keep        what B or I needs         the activations
    U       update of the stage's parameters            its last B or W           new parameters

A schedule is made of the first four; messages are what lowering adds (programs/lowering.py). The last two stand in
measured timelines: R right before the B or I of its chunk, whose time does not count it; U where parameters are updated
during the backward, with the last chunk, which the stage waited for.

The zero-bubble papers (Qi et al. 2023, arXiv 2401.10241) write "B" for what is I here; here B is always the whole
backward. Nothing else in this package repeats the difference.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from scheduler.errors import ScheduleError


class Kind(StrEnum):
    """The kind of work of an action: a row of the table above."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the word that the whole project uses
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    R = "R"
    U = "U"

    @property
    def is_backward(self) -> bool:
        """Whether this kind makes the gradient of a stage's input, which the stage before waits for: B and I.

        >>> [str(kind) for kind in Kind if kind.is_backward]
        ['B', 'I']
        """
        return self is Kind.B or self is Kind.I

    @property
    def is_send(self) -> bool:
        """Whether this kind gives a message away."""
        return self is Kind.SEND_F or self is Kind.SEND_B

    @property
    def is_receive(self) -> bool:
        """Whether this kind takes a message."""
        return self is Kind.RECV_F or self is Kind.RECV_B


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)  # what schedules are made of
WORDS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient",
    Kind.SEND_F: "send", Kind.RECV_F: "receive", Kind.SEND_B: "send", Kind.RECV_B: "receive",
    Kind.R: "recomputation", Kind.U: "update",
}


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


_TEXT = re.compile(rf"(0|[1-9][0-9]*)({'|'.join(Kind)})(0|[1-9][0-9]*)")


class Event(NamedTuple):
    """`action` ran on `lane` from `start` to `end`."""

    action: Action
    lane: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """The duration of the action."""
        return self.end - self.start
