"""CUDA's numbers of devices: those of `cuda:0`, which are not NVML's.

    torch has started CUDA ──► it tells the UUIDs of its devices
    it has not             ──► CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and the rules of CUDA's programming guide

NVML and nvidia-smi count the GPUs of the host by PCI bus, and know of no variable. CUDA counts those that
CUDA_VISIBLE_DEVICES names, in the order of its list. Numbers in that list count by PCI bus only with
CUDA_DEVICE_ORDER=PCI_BUS_ID. By default the fastest GPU is first, by a heuristic that NVIDIA does not publish: of
unlike GPUs nobody but CUDA knows the numbers then. Equal ones keep the order of the bus.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration" (a process
gets one instance); torch.cuda._parse_visible_devices (2.13) for what the guide does not say: a list is of the kind of
its first entry, and a device named twice leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

import torch

from partition.hardware.gpus import Unit

T = TypeVar("T")


class Numbering(NamedTuple):
    """Positions of devices, as CUDA counts them in this process.

    Attributes:
        visible: positions in the list of units; the place in this list is CUDA's number, if `is_known`.
        is_known: whether the order is known. If not, `visible` are those that may be seen.
        notes: sentences for people.
    """

    visible: list[int]
    is_known: bool
    notes: list[str]


def uuids_of_torch() -> list[str] | None:
    """The UUIDs of torch's CUDA devices, without "GPU-"; None while this process has not started CUDA."""
    if not torch.cuda.is_initialized():
        return None
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def number_devices(
    units: Sequence[Unit], environment: Mapping[str, str], torch_uuids: Sequence[str] | None = None
) -> Numbering:
    """Numbers the devices of a host as CUDA does in a process.

    Args:
        units: in the order of the PCI bus.
        environment: variables of the process.
        torch_uuids: the UUIDs of CUDA's devices, where torch has started it.
    """
    by_uuid = {unit.device.uuid[4:]: index for index, unit in enumerate(units) if unit.device.uuid is not None}
    if torch_uuids is not None and all(uuid in by_uuid for uuid in torch_uuids):
        return Numbering([by_uuid[uuid] for uuid in torch_uuids], True, [])
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.startswith("MIG-"):
        return _instance(units, visible)
    gpus = list(dict.fromkeys(unit.gpu_uuid for unit in units if unit.is_usable and unit.gpu_uuid is not None))
    if visible is not None and visible.startswith("GPU-"):
        numbering = Numbering(_places(_with_prefix(visible, "GPU-"), [(uuid,) for uuid in gpus]), True, [])
    else:
        numbering = _counted(units, gpus, visible, environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")
    return _spread(units, gpus, numbering)


def _counted(units: Sequence[Unit], gpus: Sequence[str], visible: str | None, by_bus: bool) -> Numbering:
    """Numbers among `gpus` where CUDA_VISIBLE_DEVICES has numbers or is not there."""
    chosen = list(range(len(gpus))) if visible is None else _numbers(visible, len(gpus))
    lost = [unit.device for unit in units if unit.gpu is None or unit.gpu_uuid is None]
    if lost and chosen:
        labels = ", ".join(f"{device.label} ({next(iter(device.unknown.values()), 'no uuid')})" for device in lost)
        return Numbering(list(range(len(gpus))), False, [f"{labels}: CUDA's numbers of the others are not known."])
    if by_bus or len(gpus) < 2 or not chosen:
        return Numbering(chosen, True, [])
    names = {f"{unit.device.name}".partition(" MIG ")[0] for unit in units if unit.is_usable}
    if len(names) < 2:
        return Numbering(chosen, True, [_EQUAL])
    return Numbering(list(range(len(gpus))), False, [_UNLIKE])


def _spread(units: Sequence[Unit], gpus: Sequence[str], numbering: Numbering) -> Numbering:
    """Positions among units from positions among GPUs. If one has instances, CUDA shows the first instance alone."""
    groups = [[index for index, unit in enumerate(units) if unit.gpu_uuid == uuid] for uuid in gpus]
    chosen = [groups[gpu] for gpu in numbering.visible]
    parts = [index for group in chosen for index in group if units[index].device.is_mig]
    if parts:
        is_known = numbering.is_known or len(parts) == 1
        return Numbering(parts[:1] if is_known else parts, is_known, [*numbering.notes, _ONE_INSTANCE])
    return numbering._replace(visible=[index for group in chosen for index in group])


def _instance(units: Sequence[Unit], visible: str) -> Numbering:
    names = [[name for name in (unit.device.uuid, unit.alias) if name] if unit.device.is_mig else [] for unit in units]
    positions = _places(_with_prefix(visible, "MIG-"), names)
    return Numbering(positions[:1], True, [_ONE_INSTANCE] if len(positions) > 1 else [])


def _with_prefix(visible: str, prefix: str) -> list[str]:
    """The entries of a list up to the first of another kind; none if one stands there twice."""
    return _if_once(list(takewhile(lambda entry: entry.startswith(prefix), visible.split(","))))


def _places(entries: Sequence[str], names: Sequence[Sequence[str]]) -> list[int]:
    """Positions of the names that begin so, up to the first entry that fits none or several."""
    positions: list[int] = []
    for entry in entries:
        exact = [index for index, of_one in enumerate(names) if entry in of_one]
        fitting = exact or [index for index, of_one in enumerate(names) if any(n.startswith(entry) for n in of_one)]
        if len(fitting) != 1:
            break
        positions += fitting
    return _if_once(positions)


def _numbers(visible: str, count: int) -> list[int]:
    """The numbers of a list up to the first that is none, as C's strtol reads them; none if one stands there twice."""
    matches = (re.match(r"[+]?\d+", entry.strip()) for entry in visible.split(","))
    numbers = _if_once([int(match[0]) for match in takewhile(bool, matches) if match])
    return list(takewhile(lambda number: number < count, numbers))


def _if_once(entries: list[T]) -> list[T]:
    """The same; none if one stands there twice."""
    return entries if len(set(entries)) == len(entries) else []


_EQUAL = (
    "CUDA has not started in this process: its numbers are taken to be those of the PCI bus, which its default order "
    "of equal GPUs is. CUDA_DEVICE_ORDER=PCI_BUS_ID makes sure."
)
_UNLIKE = (
    "The GPUs are not alike, and CUDA's default order, the fastest first, is not published: nobody knows its numbers "
    "before CUDA starts. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or call torch.cuda.init() first."
)
_ONE_INSTANCE = (
    "CUDA shows a process one instance of MIG, and beside it no GPU: a pipeline over several takes a rank for each, "
    "with its own CUDA_VISIBLE_DEVICES=MIG-..."
)
