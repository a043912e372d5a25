"""An event: an action that ran, its lane, its start and its end."""

from typing import NamedTuple

from scheduler.action import Action


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
