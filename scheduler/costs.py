"""How long does an action take, and how long is the way between two stages?

    Costs(forward=..., input=..., weight=...)  --of(action)-->  time        --hop(sender, receiver)-->  time

    F   forward
    B   backward (input + weight unless given) + recompute
    I   input + recompute
    W   weight

Each is a number, one number for each stage, or a function of (stage, chunk); in slots or in seconds, as you like, but
all in the same unit. `link` is what a message takes between two neighbours on different lanes, either way: a number,
one for each boundary (stages - 1 of them), or a function of (sender, receiver), both stages.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real

from scheduler.action import Action, Kind
from scheduler.errors import ScheduleError

__all__ = ["Cost", "Costs"]

Cost = float | Sequence[float] | Callable[[int, int], float]


@dataclass(frozen=True)
class Costs:
    """What actions and messages cost.

    Args:
        forward: of F
        input: of I
        weight: of W
        backward: of B; None means input + weight
        recompute: of running F once more before B or I, where activations are not kept
        link: of one message between neighbouring stages on different lanes

    Raises:
        ScheduleError: a cost is negative, not finite or no number.

    >>> costs = Costs(forward=(1, 3), weight=lambda stage, chunk: 2 + stage, recompute=1)
    >>> [costs.of(Action.parse(text)) for text in ("1F0", "1B0", "1I0", "1W0")]
    [3, 5, 2, 3]
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    backward: Cost | None = None
    recompute: Cost = 0
    link: Cost = 0

    def __post_init__(self) -> None:
        for what, cost in self._given():
            if isinstance(cost, Iterable):
                cost = tuple(cost)
                object.__setattr__(self, what, cost)  # frozen from here on: hashable, and nobody else's list
            if not callable(cost):
                for number in cost if isinstance(cost, tuple) else (cost,):
                    _refuse_unless_cost(what, number)

    def of(self, action: Action) -> float:
        """How long `action` takes.

        Raises:
            ScheduleError: a function gave what is not a cost.
        """
        stage, kind, chunk = action
        if kind is Kind.F:
            return _look_up("forward", self.forward, stage, chunk)
        if kind is Kind.W:
            return _look_up("weight", self.weight, stage, chunk)
        again = _look_up("recompute", self.recompute, stage, chunk)
        if kind is Kind.B and self.backward is not None:
            return again + _look_up("backward", self.backward, stage, chunk)
        again += _look_up("input", self.input, stage, chunk)
        return again if kind is Kind.I else again + _look_up("weight", self.weight, stage, chunk)

    def hop(self, sender: int, receiver: int) -> float:
        """How long a message takes from stage `sender` to its neighbour `receiver`, on another lane.

        Raises:
            ScheduleError: a function gave what is not a cost.

        >>> Costs(link=(0.5, 0.25)).hop(2, 1)
        0.25
        """
        boundary = sender if callable(self.link) else min(sender, receiver)
        return _look_up("link", self.link, boundary, receiver)

    def refuse_unless_for(self, stages: int) -> None:
        """Refuses costs that are listed for another number of stages.

        Raises:
            ScheduleError: a list has not one number for each stage (for `link`, for each boundary).
        """
        for what, cost in self._given():
            places, wanted = ("boundaries", stages - 1) if what == "link" else ("stages", stages)
            if isinstance(cost, tuple) and len(cost) != wanted:
                raise ScheduleError(
                    f"{what} lists {len(cost)} costs but there are {wanted} {places} ({what}: {cost}). "
                    f"List one for each of the {places}, or give one number for all."
                )

    def _given(self) -> list[tuple[str, Cost]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)
                if getattr(self, field.name) is not None]


def _look_up(what: str, cost: Cost, stage: int, chunk: int) -> float:
    if isinstance(cost, (int, float)):  # first, because it is nearly always so
        return cost
    if callable(cost):
        number = cost(stage, chunk)
        _refuse_unless_cost(what, number)
        return number
    return cost[stage] if isinstance(cost, Sequence) else cost


def _refuse_unless_cost(what: str, number: object) -> None:
    if not isinstance(number, Real) or not 0 <= float(number) < math.inf:
        raise ScheduleError(
            f"{what} costs {number!r}, but time is a finite number that is not negative. "
            f"Give {what} as a number, one for each stage, or a function of (stage, chunk) that returns one."
        )
