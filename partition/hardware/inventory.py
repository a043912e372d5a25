"""The devices of this host that a pipeline may run on, as `devices()` finds them.

    NVML ──► gpus, links ──numbering──► Devices: visible (cuda:0, cuda:1, ...), hidden, links ──► choose, caps, sampling
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any
from warnings import warn

import torch

from partition.errors import PartitionError
from partition.hardware.gpus import Device, read_units
from partition.hardware.links import DeviceLink, DeviceLinks, read_links
from partition.hardware.numbering import number_devices, uuids_of_torch
from partition.hardware.nvml import NvmlUnavailable, opened, words_of
from partition.hardware.sampling import DeviceSampling
from partition.hardware.selection import MARGIN, Choice, choose, memory_cap
from partition.hardware.tables import as_plain_values, bandwidths, device_table, link_table
from scheduler.aligning import aligned


@dataclass(frozen=True)
class Devices:
    """GPUs of the host, how they are joined, and what is to be known of them. Prints as tables.

    A sequence of those that this process can use, in CUDA's order: `len(gpus)`, `gpus[0]`, `for device in gpus`.

    Attributes:
        visible: those that this process can use; in the order of the PCI bus where CUDA's is not known.
        hidden: the others of the host: that CUDA_VISIBLE_DEVICES leaves out, that are lost, further parts of a GPU.
        links: of each pair, by positions in visible + hidden.
        notes: sentences: why there are none, what is not known.
    """

    visible: tuple[Device, ...] = ()
    hidden: tuple[Device, ...] = ()
    links: DeviceLinks = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.visible)

    def __iter__(self) -> Iterator[Device]:
        return iter(self.visible)

    def __getitem__(self, index: int) -> Device:
        return self.visible[index]

    def __str__(self) -> str:
        devices = aligned(device_table(self.visible, self.hidden)) if self.all else []
        links = [*aligned(link_table(self.all, self.links)), *bandwidths(self.links)] if self.links else []
        return "\n\n".join("\n".join(part) for part in (devices, links, self.notes) if part)

    def to_json(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts; what is not known is None, and "unknown" says why.

        "links" is a matrix over visible and hidden devices, None on its diagonal.
        """
        positions = range(len(self.all))
        pairs = {pair: {"name": str(link), **asdict(link)} for pair, link in self.links.items()}
        return {
            "visible": list(map(as_plain_values, self.visible)),
            "hidden": list(map(as_plain_values, self.hidden)),
            "links": [[pairs.get(frozenset((row, column))) for column in positions] for row in positions],
            "notes": list(self.notes),
        }

    @property
    def all(self) -> tuple[Device, ...]:
        """All devices of the host, the visible ones first."""
        return self.visible + self.hidden

    def link(self, one: Device, other: Device) -> DeviceLink:
        """The way between two of these devices.

        Raises:
            PartitionError: they are not two of these.
        """
        pair = frozenset(self.all.index(device) for device in (one, other) if device in self.all)
        if pair not in self.links:
            raise PartitionError(f"{one.label} and {other.label} are not two of these devices: {_listed(self.all)}.")
        return self.links[pair]

    def choose(self, count: int) -> Choice:
        """Chooses devices for a pipeline, and their order.

        First those that nobody else uses and that are not short of memory (less than half of what the freest has
        free). Of these the line with the fastest links between neighbours: the slowest link decides, then the next
        slowest. Exact for up to 10 visible devices; `Choice.is_exact` says it. A link from the last device back to
        the first, which interleaved schedules use, does not count.

        Args:
            count: how many.

        Warns:
            UserWarning: a chosen device is in use, or a link is slow; as in `Choice.warnings`.

        Raises:
            PartitionError: there are not so many; the words say why.

        Example:
            >>> gpus = devices()
            >>> try:
            ...     choice = gpus.choose(len(gpus) + 1)
            ... except PartitionError as error:
            ...     print(str(error)[:13])
            cannot choose
        """
        choice = self.best(count)
        if choice.warnings:
            warn(" ".join(choice.warnings), stacklevel=2)
        return choice

    def best(self, count: int) -> Choice:
        """As `choose`, without a warning: the words are in the choice.

        Raises:
            PartitionError: there are not so many.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(self):
            raise PartitionError(
                f"cannot choose {count!r} of {len(self)} visible devices ({_listed(self.visible)}). "
                + (f"Ask for 1 to {len(self)}." if self.visible else " ".join(self.notes))
            )
        positions = range(len(self))
        pairs = map(frozenset, combinations(positions, 2))
        return choose(self.visible, {pair: self.links[pair] for pair in pairs}, count)

    def caps(self, margin: float = MARGIN) -> list[int]:
        """The bytes that each visible device may be planned to hold: what is free now, less a margin.

        What this process holds there already is not free.

        Args:
            margin: the share of the free bytes that is kept back: for CUDA itself, libraries and NCCL, which take
                memory beside torch's, and for holes between blocks.

        Raises:
            PartitionError: the margin is no share, or NVML did not tell a device's memory.
        """
        return [memory_cap(device, margin) for device in self.visible]

    def sampling(
        self, which: Iterable[torch.device | str | int] | None = None, *, every: float = 0.1
    ) -> DeviceSampling:
        """A context within which power and utilisation are sampled, in a thread, and energy is counted.

        Args:
            which: CUDA's devices, as torch names them, with their numbers; None: all that are visible. Each once,
                however often it is named, and none for "cpu": `pipe.devices` will do.
            every: seconds between two samples. The power of recent GPUs is itself an average over a second.

        Raises:
            PartitionError: a device is none of these.
        """
        if which is None:
            return DeviceSampling(self.visible, every)
        names = dict.fromkeys(f"{torch.device(device)}" for device in which)
        by_name = {device.label: device for device in self.visible if device.index is not None}
        missing = [name for name in names if name not in by_name and name != "cpu"]
        if missing:
            raise PartitionError(
                f"cannot sample {missing[0]}: the devices that NVML tells of are {', '.join(by_name) or 'none'}. "
                + " ".join(self.notes)
            )
        return DeviceSampling([by_name[name] for name in names if name in by_name], every)


def devices(environment: Mapping[str, str] | None = None) -> Devices:
    """Looks at the GPUs of this host through NVIDIA's management library (NVML).

    CUDA is not started. Where torch has started it, it tells which device is which number; before, CUDA_VISIBLE_DEVICES
    and CUDA_DEVICE_ORDER do. Nothing raises for lack of a driver, of nvidia-ml-py or of NVIDIA's devices: there are no
    devices then, and `notes` say why. What a device does not tell is None, and its `unknown` says why.

    Args:
        environment: variables of the process that is to use them; None: those of this process.

    Example:
        >>> gpus = devices()
        >>> len(gpus) > 0 or gpus.notes[0] != ""
        True
        >>> for device in gpus:
        ...     assert device.free_bytes is None or device.free_bytes <= device.total_bytes
        >>> caps = gpus.caps(margin=0.1) if all(device.free_bytes is not None for device in gpus) else None
    """
    torch_uuids = uuids_of_torch() if environment is None else None
    try:
        with opened() as nvml:
            try:
                units = read_units(nvml)
                numbering = number_devices(units, os.environ if environment is None else environment, torch_uuids)
                visible = [units[number] for number in numbering.visible]
                units = visible + [unit for number, unit in enumerate(units) if number not in numbering.visible]
                links = read_links(nvml, units)
            except nvml.NVMLError as error:
                raise NvmlUnavailable(f"NVML does not tell how many GPUs there are: {words_of(error)}") from error
    except NvmlUnavailable as error:
        return Devices(notes=(f"No GPUs: {error}.", *_others()))
    notes = list(numbering.notes)
    if not units:
        notes += ["No GPUs: NVIDIA's driver shows none.", *_others()]
    elif not visible:
        notes.append("CUDA_VISIBLE_DEVICES leaves this process no device.")
    elif torch.version.cuda is None:
        notes.append("This torch is built without CUDA: it can use none of these devices.")
    numbered = [replace(unit.device, index=number if numbering.is_known else None)
                for number, unit in enumerate(visible)]
    return Devices(tuple(numbered), tuple(unit.device for unit in units[len(visible):]), links, tuple(notes))


def _others() -> list[str]:
    """Words about accelerators that torch can use all the same: of other makes, or of boards without NVML."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ["Pipes run on the host: devices=['cpu', 'cpu', ...]."]
    maker = "AMD's (ROCm)" if torch.version.hip is not None else f"of kind {kind.type!r}"
    return [
        f"torch has {torch.accelerator.device_count()} devices {maker}, which NVML does not know: Pipes run on them, "
        f"devices=['{kind.type}:0', ...], but their links, power and other users are not told here."
    ]


def _listed(gpus: Iterable[Device]) -> str:
    return ", ".join(device.label for device in gpus) or "none"
