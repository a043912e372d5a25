"""Links: the time that a message takes between two stages or lanes.

    a number                      every message
    Link(latency, bandwidth)      latency + size / bandwidth
    one of these a boundary       (between stages 0 and 1, 1 and 2, ...), either way
    {(lane, lane): one of these}  from lane to lane, where machines are wired differently
    a function                    of (sender, receiver), both stages
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.errors import ScheduleError, refuse_unless_finite


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
        link = links(sender, receiver)
        refuse_unless_finite("link", link)
    else:
        link = links
    return link.time(size) if isinstance(link, Link) else link
