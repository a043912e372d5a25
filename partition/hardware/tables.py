"""Devices as tables for people, and as JSON for programs.

    device  name         free        total      ...           │       │ cuda:0  cuda:1
    cuda:0  NVIDIA H100  78.6 GiB  79.6 GiB                   │ cuda:0│   -      NV18

A field that is not known shows why, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from partition.hardware.gpus import Device, gib
from partition.hardware.links import DeviceLinks

TextTable = list[list[str]]


def device_table(devices: Sequence[Device], hidden: Sequence[Device]) -> TextTable:
    """The rows of a table of devices, the head first."""
    rows = [_row(device, device.label) for device in devices]
    return [_HEAD, *rows, *(_row(device, f"{device.label} (hidden)") for device in hidden)]


def link_table(devices: Sequence[Device], links: DeviceLinks) -> TextTable:
    """The rows of the matrix of links, the head first."""
    labels = [device.label for device in devices]
    positions = range(len(devices))
    rows = [
        [labels[row], *("-" if row == column else str(links[frozenset((row, column))]) for column in positions)]
        for row in positions
    ]
    return [["", *labels], *rows]


def bandwidths(links: DeviceLinks) -> list[str]:
    """For each kind of link its bandwidth in words, fastest first."""
    kinds = dict.fromkeys((link.rank, str(link), link.bandwidth, link.peer) for link in links.values())
    lines = []
    for _, name, bandwidth, peer in sorted(kinds, key=lambda kind: kind[0]):
        speed = "bandwidth not known" if bandwidth is None else f"at most {bandwidth / 1e9:.1f} GB/s each way"
        lines.append(f"{name}: {_MEANING[name[:2]]}, {speed}{', no peers' if peer is False else ''}")
    return list(dict.fromkeys(lines))


def as_plain_values(device: Device) -> dict[str, Any]:
    """A device as numbers, strings, lists and dicts."""
    others = None if device.processes is None else [process._asdict() for process in device.others]
    return asdict(device) | {"label": device.label, "processes": others}


def _row(device: Device, label: str) -> list[str]:
    def shown(field: str, value: Any, spelt: Callable[[Any], str]) -> str:
        return device.unknown.get(field, "not told") if value is None else spelt(value)

    return [
        label,
        shown("name", device.name, str),
        shown("uuid", device.uuid, lambda uuid: f"{uuid}"[:12]),
        shown("memory", device.free_bytes, gib),
        shown("memory", device.total_bytes, gib),
        shown("utilisation", device.utilisation, "{:.0%}".format),
        shown("power", device.watts, "{:.0f} W".format),
        shown("limit", device.watt_limit, "{:.0f} W".format),
        shown("processes", device.processes, lambda _: ", ".join(_processes(device)) or "-"),
    ]


def _processes(device: Device) -> Iterator[str]:
    for pid, used in device.others:
        yield f"{pid}" if used is None else f"{pid} ({gib(used)})"


_HEAD = ["device", "name", "uuid", "free", "total", "utilised", "power", "limit", "other processes"]
_MEANING = {  # by the first two letters
    "NV": "NVLinks", "IN": "on one board", "PI": "one PCIe switch", "PX": "several PCIe switches",
    "PH": "a PCIe host bridge", "NO": "several host bridges of a NUMA node", "SY": "between NUMA nodes",
    "?": "not told",
}  # fmt: skip
