"""Choice of devices for a pipeline: which, and in which order, so that neighbours have fast links.

    cost of a line of devices  =  how many are busy or short of memory, then how many of its links are of the slowest
                                  kind, of the next slowest, ... compared in this order
    best_line                  ──► the least, exactly up to 10 candidates (dynamic programming over sets, as Held and
                                   Karp 1962 for tours); of more candidates the best that the best beginnings lead to
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import combinations, permutations
from operator import itemgetter

import scheduler
from partition.errors import PartitionError
from partition.hardware.gpus import Device, gib
from partition.hardware.links import DeviceLink, DeviceLinks

MARGIN = 0.1
GpuOrder = tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Devices in the order of a pipeline's stages.

    Attributes:
        devices: the first has the first stage.
        pairs: the link of each two, by their places in `devices`.
        warnings: sentences about devices that others use and links that are slow.
        is_exact: whether no other choice or order is better.

    Example:
        >>> device = Device(0, 0, "NVIDIA L4", "GPU-1", total_bytes=24 << 30, free_bytes=20 << 30)
        >>> choice = Choice((device,), {}, (), True)
        >>> choice.names, choice.caps(margin=0.5), choice.environment
        (['cuda:0'], [10737418240], {'CUDA_VISIBLE_DEVICES': 'GPU-1'})
        >>> print(choice)
        stages on cuda:0 (no order is better)
    """

    devices: tuple[Device, ...]
    pairs: DeviceLinks = field(repr=False)
    warnings: tuple[str, ...]
    is_exact: bool

    def __str__(self) -> str:
        separators = [*(f" --{link}-- " for link in self.links), ""]
        line = "".join(device.label + separator for device, separator in zip(self.devices, separators, strict=True))
        optimality = "no order is better" if self.is_exact else "the best that was found; a better order may exist"
        return "\n".join([f"stages on {line} ({optimality})", *(f"warning: {warning}" for warning in self.warnings)])

    @property
    def links(self) -> tuple[DeviceLink, ...]:
        """The link of each device to the next."""
        return tuple(self.pairs[frozenset((place, place + 1))] for place in range(len(self.devices) - 1))

    @property
    def messages(self) -> dict[tuple[int, int], scheduler.Link] | None:
        """The time of a message of so many bytes from lane to lane, in seconds: `plan(..., link=choice.messages)`.

        By bandwidths, so it takes no less. None: NVML did not tell the bandwidth of each pair.
        """
        if any(link.bandwidth is None for link in self.pairs.values()):
            return None
        links = {pair: scheduler.Link(0, link.bandwidth or 0) for pair, link in self.pairs.items()}
        return {lanes: links[frozenset(lanes)] for lanes in permutations(range(len(self.devices)), 2)}

    @property
    def names(self) -> list[str]:
        """Their names in torch in this process: `Pipe(..., devices=choice.names)`.

        Raises:
            PartitionError: CUDA's numbers are not known here.
        """
        unknown = [device.label for device in self.devices if device.index is None]
        if unknown:
            raise PartitionError(
                f"nobody knows CUDA's number of {', '.join(unknown)} in this process. Start it with "
                "CUDA_VISIBLE_DEVICES as in `environment`, or with CUDA_DEVICE_ORDER=PCI_BUS_ID."
            )
        return [device.label for device in self.devices]

    @property
    def environment(self) -> dict[str, str]:
        """A variable that shows a new process these devices, in this order, whatever CUDA's numbers are.

        Raises:
            PartitionError: NVML did not tell the UUID of one.
        """
        unknown = [device.label for device in self.devices if device.uuid is None]
        if unknown:
            raise PartitionError(f"the UUID of {', '.join(unknown)} is not known. Use `names`.")
        return {"CUDA_VISIBLE_DEVICES": ",".join(f"{device.uuid}" for device in self.devices)}

    def caps(self, margin: float = MARGIN) -> list[int]:
        """The bytes that each device may be planned to hold.

        Args:
            margin: the share of the free bytes that is kept back: for CUDA itself, libraries and NCCL, which take
                memory beside torch's, and for holes between blocks.

        Raises:
            PartitionError: the margin is no share, or NVML did not tell a device's memory.
        """
        return [memory_cap(device, margin) for device in self.devices]


def memory_cap(device: Device, margin: float) -> int:
    """The bytes that are free, less the share `margin` of them.

    Raises:
        PartitionError: the margin is no share, or the memory is not known.
    """
    if not 0 <= margin < 1:
        raise PartitionError(f"margin is {margin!r}. Give the share of the free memory to keep back, 0 to below 1.")
    if device.free_bytes is None:
        why = device.unknown.get("memory", "not told")
        raise PartitionError(f"the free memory of {device.label} is not known ({why}). Give its bytes yourself.")
    return int(device.free_bytes * (1 - margin))


def why_poor(device: Device, most_free: int) -> str:
    """In words, why others should be taken first; "" if nothing speaks against a device.

    Args:
        device: one of several.
        most_free: the bytes that the freest of them has free.
    """
    others = device.others
    if others:
        used = [process.used_bytes for process in others]
        words = "" if None in used else f" ({gib(sum(filter(None, used)))})"
        pids = ", ".join(f"{process.pid}" for process in others)
        return f"is in use by process{'es' if len(others) > 1 else ''} {pids}{words}"
    is_here = len(others) < len(device.processes or ())  # then it may be this process that computes
    if device.utilisation is not None and device.utilisation >= _BUSY and not is_here:
        return f"computes {device.utilisation:.0%} of the time"
    if device.free_bytes is None or device.total_bytes is None:
        return ""
    process_bytes = sum(process.used_bytes or 0 for process in device.processes or ())
    hidden = device.total_bytes - device.free_bytes - process_bytes
    if hidden > _HELD * device.total_bytes:
        return f"has {gib(hidden)} in use, by no process that is shown here"
    if device.free_bytes < most_free / 2:
        return f"has {gib(device.free_bytes)} free, others up to {gib(most_free)}"
    return ""


def choose(devices: Sequence[Device], links: DeviceLinks, count: int) -> Choice:
    """The best line of `count` devices.

    Args:
        devices: the candidates; of equal choices the one with the first of these is taken.
        links: of each pair, by positions in `devices`.
        count: how many, from 1 to all of them.
    """
    most_free = max((device.free_bytes or 0 for device in devices), default=0)
    faults = [why_poor(device, most_free) for device in devices]
    line, is_exact = best_line(list(map(bool, faults)), {pair: link.rank for pair, link in links.items()}, count)
    pairs = {frozenset((a, b)): links[frozenset((line[a], line[b]))] for a, b in combinations(range(count), 2)}
    warnings = [f"{devices[place].label} {faults[place]}." for place in line if faults[place]]
    has_nvlink = any(link.nvlinks for link in links.values())
    choice = Choice(tuple(devices[place] for place in line), pairs, (), is_exact)
    for device, next_device, link in zip(choice.devices, choice.devices[1:], choice.links):
        reason = _why_slow(link, has_nvlink)
        if reason:
            warnings.append(f"{device.label} to {next_device.label} ({link}) {reason}.")
    return replace(choice, warnings=tuple(warnings))


def best_line(
    is_poor: Sequence[bool], ranks: Mapping[frozenset[int], tuple[float, ...]], count: int
) -> tuple[GpuOrder, bool]:
    """The places of the best line, and whether none is better.

    Args:
        is_poor: of each candidate, whether others should be taken first.
        ranks: of each pair, the slower the greater.
        count: how many candidates a line has.
    """
    # One number says it all: in a line there are fewer than `base` links of a kind, and fewer poor ones than that.
    kinds = {rank: kind for kind, rank in enumerate(sorted(set(ranks.values())))}
    base = count + 1
    weights: list[int] = [base**kind for kind in range(len(kinds) + 1)]
    nodes = [weights[-1] if poor else 0 for poor in is_poor]
    edges = {pair: weights[kinds[rank]] for pair, rank in ranks.items()}

    # For each set of places and its last one the best line through all of them, from smaller sets to larger.
    lines: dict[tuple[frozenset[int], int], tuple[int, GpuOrder]] = {
        (frozenset([place]), place): (node, (place,)) for place, node in enumerate(nodes)
    }
    is_exact = True
    for _ in range(count - 1):
        is_exact &= len(lines) <= _MOST
        longer: dict[tuple[frozenset[int], int], tuple[int, GpuOrder]] = {}
        for (places, last), (cost, line) in nsmallest(_MOST, lines.items(), key=itemgetter(1)):
            for place in set(range(len(nodes))) - places:
                key = places | {place}, place
                new = cost + nodes[place] + edges[frozenset((last, place))], (*line, place)
                if key not in longer or new < longer[key]:
                    longer[key] = new
        lines = longer
    cost, line = min(lines.values())
    return line, is_exact or cost == sum(sorted(nodes)[:count]) + (count - 1) * weights[0]


def _why_slow(link: DeviceLink, has_nvlink: bool) -> str:
    if link.nvlinks:
        return ""
    if link.peer is False:
        return "goes through the host's memory: these two are no peers"
    if link.level == 50:
        return "goes from one NUMA node to another, mostly between sockets"
    if link.level is None:
        return "is not known"
    return "has no NVLink, as others here have" if has_nvlink else ""


_MOST = 1260  # lines that are made longer, the best so far: as many as ten candidates have at the most
_BUSY = 0.1  # of the time: a desktop takes a few per cent
_HELD = 0.1  # of the memory: less than that the driver itself may hold
