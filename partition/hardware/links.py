"""Links between GPUs: NVLinks, directly or over switches, or the way over PCIe.

    NVLinks of a GPU ──► ends: another GPU's bus, or a switch  ─┐
    common ancestor of two GPUs on PCIe ────────────────────────┴──► DeviceLink of each pair

        NV18   bonded NVLinks, how many                                      what nvidia-smi topo -m calls them;
        INT    two GPUs on one board                                         NVML's levels are the last six, from near
        PIX    one PCIe switch between                                       to far
        PXB    several PCIe switches, no host bridge
        PHB    a PCIe host bridge, so mostly the CPU
        NODE   several host bridges of one NUMA node
        SYS    the interconnect between NUMA nodes, so mostly between sockets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from partition.hardware.gpus import Unit, text_of
from partition.hardware.nvml import NvmlQueries


@dataclass(frozen=True)
class DeviceLink:
    """The way from one device to another. What NVML did not tell is None.

    Attributes:
        nvlinks: how many NVLinks; 0: none, so the way is over PCIe.
        level: on PCIe, NVML's number: 0 INT, 10 PIX, 20 PXB, 30 PHB, 40 NODE, 50 SYS.
        bandwidth: bytes per second in one direction at most: of all these NVLinks, or of the narrower of both PCIe
            slots. Over switches and bridges others share it; over SYS the sockets may be joined by less.
        peer: whether a GPU reads the other's memory by itself; if not, values go through the host's memory.

    Example:
        >>> print(DeviceLink(nvlinks=18, level=50, bandwidth=478e9), DeviceLink(level=30), DeviceLink())
        NV18 PHB ?
    """

    nvlinks: int = 0
    level: int | None = None
    bandwidth: float | None = None
    peer: bool | None = None

    def __str__(self) -> str:
        return f"NV{self.nvlinks}" if self.nvlinks else _NAMES.get(self.level, "?")

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is faster. NVLinks by bandwidth, then PCIe: with peers, by level, by bandwidth; then the unknown."""
        speed = -(self.bandwidth or 0)
        if self.nvlinks:
            return (0, speed, -self.nvlinks)
        return (1, self.peer is False, 100 if self.level is None else self.level, speed)


DeviceLinks = dict[frozenset[int], DeviceLink]


def read_links(nvml: Any, units: Sequence[Unit]) -> DeviceLinks:
    """The link of each pair of units, by their positions. Instances of MIG have no NVLinks and are no peers."""
    buses = {unit.device.bus for unit in units}
    ends = [_ends(nvml, unit, buses) for unit in units]
    slots = [_slot_bandwidth(nvml, unit.gpu) for unit in units]
    links = {}
    for first, second in combinations(range(len(units)), 2):
        pair = units[first], units[second]
        slot = _least(slots[first], slots[second])
        links[frozenset((first, second))] = _link(nvml, pair, (ends[first], ends[second]), slot)
    return links


def _link(nvml: Any, pair: tuple[Unit, Unit], ends: tuple[list[str], list[str]], slots: float | None) -> DeviceLink:
    if pair[0].gpu is None or pair[1].gpu is None:
        return DeviceLink()
    queries = NvmlQueries(nvml, pair[0].gpu)
    if pair[0].device.bus == pair[1].device.bus:
        return DeviceLink(level=0, peer=False)
    level = queries.ask("level", "nvmlDeviceGetTopologyCommonAncestor", pair[1].gpu)
    if any(unit.device.is_mig for unit in pair):
        return DeviceLink(level=level, bandwidth=slots, peer=False)
    status = [queries.ask("peer", "nvmlDeviceGetP2PStatus", pair[1].gpu, capability) for capability in (_READ, _NVLINK)]
    peer = None if status[0] is None else status[0] == 0
    count = ends[0].count(pair[1].device.bus or "")  # [1] a bridge or a board joins the two
    if not count and status[1] in (0, None):
        count = min(remotes.count(_SWITCH) for remotes in ends)  # [2] switches do, and lead from any GPU to any other
    if not count:
        return DeviceLink(0, level, slots, peer)
    speed = _least(*(_nvlink_speed(nvml, unit.gpu) for unit in pair))
    return DeviceLink(count, level, None if speed is None else count * speed, peer)


def _ends(nvml: Any, unit: Unit, buses: set[str | None]) -> list[str]:
    """The other end of each active NVLink of a GPU: the bus of a GPU, or a switch.

    In a virtual machine NVML may not know the other end. What is no GPU of the host is a switch then, as NCCL has it
    (NCCL, issue 1182).
    """
    queries = NvmlQueries(nvml, unit.gpu)
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS if unit.gpu is not None else 0):
        if queries.ask("state", "nvmlDeviceGetNvLinkState", link) != 1:
            continue
        kind = queries.ask("kind", "nvmlDeviceGetNvLinkRemoteDeviceType", link)
        remote = queries.ask("bus", "nvmlDeviceGetNvLinkRemotePciInfo", link)
        bus = None if remote is None else text_of(remote.busId).upper()
        if bus is not None and bus in buses:
            ends.append(bus)
        elif kind in (None, _IS_SWITCH, _IS_UNKNOWN):
            ends.append(_SWITCH)
    return ends


def _nvlink_speed(nvml: Any, gpu: Any) -> float | None:
    """Bytes per second of one NVLink in one direction."""
    fields = [_COMMON_SPEED, *((_SPEED_OF_LINK, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))]
    values = NvmlQueries(nvml, gpu).ask("speed", "nvmlDeviceGetFieldValues", fields) or ()
    speeds = [getattr(field.value, _MEMBER[field.valueType]) for field in values
              if field.nvmlReturn == 0 and field.valueType in _MEMBER]
    return next((speed * 1e6 for speed in speeds if speed), None)


def _slot_bandwidth(nvml: Any, gpu: Any) -> float | None:
    """Bytes per second of a PCIe slot in one direction, of the fastest that card and slot have in common."""
    queries = NvmlQueries(nvml, gpu)
    generation = queries.ask("generation", "nvmlDeviceGetMaxPcieLinkGeneration")  # the current one falls when idle
    width = queries.ask("width", "nvmlDeviceGetMaxPcieLinkWidth")
    return _LANE[generation] * width or None if generation in _LANE and width is not None else None


def _least(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else min(one, other)


_NAMES: dict[int | None, str] = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_SWITCH = "switch"
# Capabilities of nvmlDeviceGetP2PStatus. pynvml's NVML_P2P_CAPS_INDEX_READ is the tuple (0,) by a comma too many.
_READ, _NVLINK = 0, 2
_IS_SWITCH, _IS_UNKNOWN = 0x02, 0xFF  # of nvmlDeviceGetNvLinkRemoteDeviceType
# Fields, in MB/s: of all links of a GPU, and of one link, which GPUs with more than 12 links have.
_COMMON_SPEED, _SPEED_OF_LINK = 90, 164
_MEMBER = {1: "uiVal", 2: "ulVal", 3: "ullVal"}  # of a field's value, by its type
# Bytes per second of a PCIe lane, by generation: transfers per second / 8, less what encoding or flits take.
_LANE = {
    1: 2.5e9 / 8 * 8 / 10, 2: 5e9 / 8 * 8 / 10, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130, 6: 64e9 / 8 * 242 / 256,
}  # fmt: skip
