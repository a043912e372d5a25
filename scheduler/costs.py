"""Costs: the durations of actions, the delays between stages, and the memory that a chunk holds.

    Costs(forward=..., input=..., weight=...)  --of(action)-->  time        --hop(sender, receiver)-->  time
                                               --held(stage)->  ChunkMemory: what a chunk holds there, from when to when

    F   forward
    B   backward (input + weight unless given) + recompute          each divided by the speed of its lane
    I   input + recompute
    W   weight

A message between two stages or lanes:

    a number                      every message
    Link(latency, bandwidth)      latency + size / bandwidth
    one of these a boundary       (between stages 0 and 1, 1 and 2, ...), either way
    {(lane, lane): one of these}  from lane to lane, where machines are wired differently
    a function                    of (sender, receiver), both stages

Each cost is a number, one number for each stage, or a function of (stage, chunk); in slots or in seconds (`unit`), but
all in the same. What is held is in memory_model.py; costs of real steps in measurement.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Literal

from scheduler.action import Action, Kind
from scheduler.errors import ScheduleError, is_list, plain, refuse_unless_finite
from scheduler.measurement import OF_ACTIONS, costs_of, links_of, measure
from scheduler.memory_model import ChunkMemory
from scheduler.placement import Placement
from scheduler.timeline import Timeline


@dataclass(frozen=True)
class Link:
    """A way between two lanes.

    Args:
        latency: what any message takes
        bandwidth: how much of a message passes in one unit of time

    Raises:
        ScheduleError: the latency is negative, or the bandwidth is not above 0.

    >>> Link(latency=2, bandwidth=8).time(64)
    10.0
    """

    latency: float = 0
    bandwidth: float = inf

    def __post_init__(self) -> None:
        refuse_unless_finite("latency", self.latency)
        if self.bandwidth != inf:
            refuse_unless_finite("bandwidth", self.bandwidth, above=True)
        for name, number in vars(self).items():
            object.__setattr__(self, name, plain(number))

    def time(self, size: float) -> float:
        """The time of a message of this size."""
        return self.latency if self.bandwidth == inf else self.latency + size / self.bandwidth


LinkCost = float | Link
Links = LinkCost | Sequence[LinkCost] | Mapping[tuple[int, int], LinkCost] | Callable[[int, int], float]


def between(links: Links, sender: int, receiver: int, lanes: tuple[int, int] | None, size: float) -> float:
    """The time of a message from one stage to its neighbour.

    Args:
        links: as above
        sender: a stage
        receiver: its neighbour
        lanes: where the two are, if it is known
        size: of the message

    Raises:
        ScheduleError: a function gave what is not a cost, or these lanes have no link.
    """
    if isinstance(links, Mapping):
        if lanes is None or lanes not in links:
            raise ScheduleError(
                f"link has nothing for lanes {lanes} (between stages {sender} and {receiver}); it has "
                f"{sorted(links)}. Give one for each pair of lanes that messages go from and to."
            )
        link = links[lanes]
    elif isinstance(links, Sequence):
        link = links[min(sender, receiver)]
    elif callable(links):
        link = plain(links(sender, receiver))
        refuse_unless_finite("link", link)
    else:
        link = links
    return link.time(size) if isinstance(link, Link) else link


Cost = float | Sequence[float] | Callable[[int, int], float]


@dataclass(frozen=True)
class Costs:
    """The times of actions and messages, and the memory of chunks.

    Args:
        forward: of F
        input: of I
        weight: of W
        backward: of B; None means input + weight
        recompute: of running F once more before B or I, where activations are not kept
        link: of one message between neighbouring stages on different lanes, either way: a number, a Link, one of these
            for each boundary (stages - 1 of them), a dict with one for each (lane, lane) that messages go from and to,
            or a function of (sender, receiver), both stages
        message: how large the tensor at a boundary is, for links with a bandwidth: a number, or one for each boundary
        speed: of the lanes: 2 takes half the time; a number, or one for each lane
        activation: what a chunk holds in a stage from its F to its B or I (M_B of the zero-bubble papers), in any
            unit: a number, or one for each stage
        kept: how much of that is held from I to W (M_W); None means all
        checkpoint: how much of that is held until it is recomputed, at the start of B or I; None: not recomputed
        unit: "slots", or "s" for seconds: what times are said in

    Raises:
        ScheduleError: a cost is negative, not finite or no number.

    >>> costs = Costs(forward=(1, 3), weight=lambda stage, chunk: 2 + stage, recompute=1)
    >>> [costs.of(Action.parse(text)) for text in ("1F0", "1B0", "1I0", "1W0")]
    [3, 5, 2, 3]
    >>> Costs(link=Link(latency=2, bandwidth=8), message=64).hop(0, 1)
    10.0
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    backward: Cost | None = None
    recompute: Cost = 0
    link: Links = 0
    message: float | Sequence[float] = 0
    speed: float | Sequence[float] = 1
    activation: float | Sequence[float] = 1
    kept: float | Sequence[float] | None = None
    checkpoint: float | Sequence[float] | None = None
    unit: Literal["slots", "s"] = "slots"

    def __post_init__(self) -> None:
        if self.unit not in ("slots", "s"):
            raise ScheduleError(f'unit is {self.unit!r}. Use "slots", or "s" for seconds.')
        for name, cost in self._items():
            if callable(cost) and name in (*OF_ACTIONS, "link"):
                continue
            if name == "link" and isinstance(cost, Mapping):
                cost = {lanes: plain(number) for lanes, number in cost.items()}
                numbers: Iterable[Any] = cost.values()
            elif is_list(cost):
                numbers = cost = tuple(map(plain, cost))
            else:
                numbers = (cost := plain(cost),)
            object.__setattr__(self, name, cost)  # frozen from here on: nobody else's list
            for number in numbers:
                if not (name == "link" and isinstance(number, Link)):
                    refuse_unless_finite(name, number, above=name == "speed")

    @classmethod
    def measured(
        cls, timelines: Timeline | Iterable[Timeline], *, by: Literal["stage", "lane"] = "stage",
        halves: "float | Costs" = 0.5, **overrides: Any,
    ) -> "Costs":
        """The costs of traced steps: medians over chunks and steps, see measurement.py.

        Args:
            timelines: of one whole step or of several, of the same Pipe: `pipe.step(..., trace=True).timeline`
            by: "stage" for `simulate` and `search`; "lane" for `compare`: what a chunk takes in all stages of a lane
            halves: where a stage was traced with whole backwards only, what I and W would take of one: Costs, of a
                plan say, in which they are to a B as they would be here; or the share of I, if W takes the rest
            overrides: other fields, such as `activation` in bytes; in place of what was measured too

        Returns:
            The costs, in the unit of the timelines. Where chunks were recomputed, `recompute` is what one recomputation
            took. Bytes are those that the timelines say; real ones say none.

        Raises:
            ScheduleError: the timelines are not of whole steps of one Pipe, or say nothing about what is asked;
                `halves` is no share, or is for another number of stages.

        >>> from scheduler import by_name, simulate
        >>> costs = Costs(forward=(2, 3), backward=5, link=1, unit="s")
        >>> Costs.measured(simulate(by_name("1f1b", lanes=2, chunks=3), costs)).backward
        (5, 5)
        """
        if by not in ("stage", "lane"):
            raise ScheduleError(f'by is {by!r}. Use "stage", or "lane" for costs of all stages of a lane together.')
        measurement = measure(timelines)
        if isinstance(halves, Costs):
            halves.refuse_unless_for(measurement.placement)
        if "link" not in overrides:
            overrides["link"] = links_of(measurement, by == "lane")
        shares = [_halves(halves, stage) for stage in range(measurement.placement.stages)]
        return cls(**costs_of(measurement, by == "lane", shares) | overrides)

    def of(self, action: Action, lane: int = 0) -> float:
        """The duration of `action` on `lane`.

        Raises:
            ScheduleError: a function gave what is not a cost.
        """
        speed = self.speed[lane] if isinstance(self.speed, Sequence) else self.speed
        return self._work(action) if speed == 1 else self._work(action) / speed

    def of_order(self, lane: int, order: Sequence[Action]) -> list[float]:
        """The duration of each action of a lane."""
        if any(callable(cost) for name, cost in self._items() if name in OF_ACTIONS):
            return [self.of(action, lane) for action in order]
        duration_of = {(stage, kind): self.of(Action(stage, kind, 0), lane)
                       for stage, kind in {action[:2] for action in order}}
        return [duration_of[stage, kind] for stage, kind, _ in order]

    def hop(self, sender: int, receiver: int, lanes: tuple[int, int] | None = None) -> float:
        """The time of a message from stage `sender` to its neighbour `receiver`, on another lane.

        Args:
            sender: a stage
            receiver: the stage before or after it
            lanes: where the two are; needed where links are given for lanes

        Raises:
            ScheduleError: a function gave what is not a cost, or these lanes have no link.

        >>> Costs(link=(0.5, 0.25)).hop(2, 1)
        0.25
        """
        size = self.message[min(sender, receiver)] if isinstance(self.message, Sequence) else self.message
        return between(self.link, sender, receiver, lanes, size)

    def hops(self, placement: Placement) -> Callable[[int, int], float]:
        """`hop` for these lanes."""
        lane_of = placement.lane_of
        return lambda sender, receiver: self.hop(sender, receiver, (lane_of[sender], lane_of[receiver]))

    def held(self, stage: int) -> ChunkMemory:
        """The memory of a chunk in `stage`."""
        values = (self.activation, self.kept, self.checkpoint)
        return ChunkMemory.of(*[value[stage] if isinstance(value, Sequence) else value for value in values])

    def refuse_unless_for(self, placement: Placement) -> None:
        """Refuses costs that are listed for another number of stages or lanes.

        Raises:
            ScheduleError: a list has not one number for each stage (for `link` and `message`, for each boundary; for
                `speed`, for each lane).
        """
        for name, cost in self._items():
            places, count = "stages", placement.stages
            if name in ("link", "message"):
                places, count = "boundaries", placement.stages - 1
            elif name == "speed":
                places, count = "lanes", placement.lanes
            if isinstance(cost, tuple) and len(cost) != count:
                raise ScheduleError(
                    f"{name} lists {len(cost)} costs but there are {count} {places} ({name}: {cost}). "
                    f"List one for each of the {places}, or give one number for all."
                )

    def _work(self, action: Action) -> float:
        stage, kind, chunk = action
        if kind is Kind.F:
            return _look_up("forward", self.forward, stage, chunk)
        if kind is Kind.W:
            return _look_up("weight", self.weight, stage, chunk)
        duration = _look_up("recompute", self.recompute, stage, chunk)
        if kind is Kind.B and self.backward is not None:
            return duration + _look_up("backward", self.backward, stage, chunk)
        duration += _look_up("input", self.input, stage, chunk)
        return duration if kind is Kind.I else duration + _look_up("weight", self.weight, stage, chunk)

    def _items(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)
                if field.name != "unit" and (field.default is not None or getattr(self, field.name) is not None)]


def _halves(halves: float | Costs, stage: int) -> tuple[float, float]:
    """The shares of I and W of a stage in its B."""
    if isinstance(halves, Costs):
        unrecomputed = replace(halves, recompute=0)
        first, second, whole = (unrecomputed.of(Action(stage, kind, 0)) for kind in (Kind.I, Kind.W, Kind.B))
        return (first / whole, second / whole) if whole else (1, 0)  # what counts no products has none that wait
    if isinstance(halves, bool) or not isinstance(halves, (int, float)) or not 0 <= halves <= 1:
        raise ScheduleError(f"halves is {halves!r}, but must be Costs, or the share of I in a backward, from 0 to 1.")
    return halves, 1 - halves


def _look_up(name: str, cost: Cost, stage: int, chunk: int) -> float:
    if isinstance(cost, (int, float)):  # first, because it is nearly always so
        return cost
    if callable(cost):
        number: float = plain(cost(stage, chunk))
        refuse_unless_finite(name, number)
        return number
    return cost[stage] if isinstance(cost, Sequence) else cost
