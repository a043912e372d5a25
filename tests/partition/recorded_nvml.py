"""Recorded hosts, played back under nvidia-ml-py: its library's functions, as the driver exports them.

    Host (GPUs and links as data) ──► Library, in the place of libnvidia-ml.so.1 ──► the real pynvml ──► what is tested

Each function has the C signature of nvml.h and writes where its pointers lead, so that all Python between is run. What
is recorded for a field may be an error's number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml
import pytest

OK, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, SHORT, GPU_IS_LOST = 0, 2, 3, 4, 6, 7, 15
SWITCH = "switch"
LEVELS = {"INT": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
GIB = 2**30


@dataclass
class Gpu:
    """What one GPU, or an instance of MIG, answers; in the place of a value may stand Error(number)."""

    uuid: str
    bus: str = ""
    name: Any = "NVIDIA H100 80GB HBM3"
    total: Any = 80 * GIB
    free: int = 79 * GIB
    utilisation: Any = 0
    processes: Any = ()  # pairs (pid, bytes)
    milliwatts: Any = 70_000
    limit: Any = 700_000
    energy: Any = 1_000_000
    nvlinks: Sequence[str] = ()  # where each ends: the bus of a GPU, SWITCH, or "hidden"
    speed: Any = 26_562  # MB/s of one NVLink, told for all together
    link_speed: Any = field(default_factory=lambda: Error(NOT_SUPPORTED))  # and told for each
    slot: tuple[Any, Any] = (5, 16)
    mig: Any = field(default_factory=lambda: Error(NOT_SUPPORTED))  # 0 off, 1 on
    instances: Sequence["Gpu | None"] = ()
    ids: tuple[int, int] = (0, 0)
    opens: int = OK


@dataclass(frozen=True)
class Error:
    """An error in the place of an answer."""

    number: int


@dataclass
class Host:
    """GPUs in NVML's order; `levels` as nvidia-smi topo -m prints PCIe, a row for each GPU; `peers` of each pair."""

    gpus: list[Gpu]
    levels: list[str]
    nvlink_status: Any = OK
    peers: Mapping[frozenset[int], Any] = field(default_factory=dict)
    init: int = OK


def hidden_mig(gpu: Gpu) -> Gpu:
    """An instance of MIG answers neither utilisation nor power."""
    none = Error(NOT_SUPPORTED)
    return replace(gpu, utilisation=none, milliwatts=none, limit=none, energy=none, slot=(none, none))


class Library:
    """The functions of libnvidia-ml.so.1 that are used, over a Host. Any other name is not found in it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls: list[str] = []
        self.opened = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        implementation = _FUNCTIONS.get(name)
        if implementation is None:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.calls.append(name)
            return implementation(self, *arguments)

        return function

    def at(self, handle: Any) -> Gpu:
        """Handles are 1 + the number of the GPU, and 100 times that + 1 + the place of an instance."""
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        if number < 100:
            return self.host.gpus[number - 1]
        instance = self.host.gpus[number // 100 - 1].instances[number % 100 - 1]
        assert instance is not None
        return instance

    def number(self, handle: Any) -> int:
        return (ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


@contextmanager
def playing(host: Host) -> Iterator[Library]:
    """Within: pynvml calls this host's library, and torch is one for CUDA."""
    library = Library(host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", library)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setattr("torch.version.cuda", "13.0")
        yield library


# ----------------------------------------------------------------------------------------------- the driver's functions


def _set(pointer: Any, value: Any) -> int:
    if isinstance(value, Error):
        return value.number
    pointer._obj.value = value
    return OK


def _handle(pointer: Any, value: int) -> int:
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = value
    return OK


def _init(library: Library, flags: int) -> int:
    library.opened += library.host.init == OK
    return library.host.init


def _shutdown(library: Library) -> int:
    library.opened -= 1
    return OK


def _count(library: Library, count: Any) -> int:
    return _set(count, len(library.host.gpus))


def _by_index(library: Library, index: Any, handle: Any) -> int:
    return library.host.gpus[index.value].opens or _handle(handle, index.value + 1)


def _by_uuid(library: Library, uuid: Any, handle: Any) -> int:
    for number, gpu in enumerate(library.host.gpus, 1):
        for place, unit in enumerate([gpu, *gpu.instances]):
            if unit is not None and unit.uuid.encode() == uuid.value:
                return unit.opens or _handle(handle, number * 100 + place if place else number)
    return NOT_FOUND


def _text(read: Callable[[Gpu], Any]) -> Callable[..., int]:
    def function(library: Library, handle: Any, buffer: Any, size: Any) -> int:
        value = read(library.at(handle))
        if isinstance(value, Error):
            return value.number
        assert len(value) < size.value
        buffer.value = value.encode()
        return OK

    return function


def _value(read: Callable[[Gpu], Any]) -> Callable[..., int]:
    return lambda library, handle, pointer: _set(pointer, read(library.at(handle)))


def _pci(library: Library, handle: Any, info: Any) -> int:
    info._obj.busId = library.at(handle).bus.encode()
    return OK


def _memory(library: Library, handle: Any, memory: Any) -> int:
    gpu = library.at(handle)
    if isinstance(gpu.total, Error):
        return gpu.total.number
    memory._obj.total, memory._obj.free, memory._obj.used = gpu.total, gpu.free, gpu.total - gpu.free
    return OK


def _rates(library: Library, handle: Any, rates: Any) -> int:
    value = library.at(handle).utilisation
    if isinstance(value, Error):
        return value.number
    rates._obj.gpu, rates._obj.memory = value, 0
    return OK


def _running(library: Library, handle: Any, count: Any, array: Any) -> int:
    processes = library.at(handle).processes
    if isinstance(processes, Error):
        return processes.number
    count._obj.value, room = len(processes), count._obj.value
    if room < len(processes):
        return SHORT
    for place, (pid, used) in enumerate(processes):
        array[place].pid, array[place].usedGpuMemory = pid, 2**64 - 1 if used is None else used
    return OK


def _mig_mode(library: Library, handle: Any, current: Any, pending: Any) -> int:
    mode = library.at(handle).mig
    return _set(current, mode) or _set(pending, mode)


def _instance(library: Library, handle: Any, index: Any, out: Any) -> int:
    gpu = library.at(handle)
    if index.value >= len(gpu.instances) or gpu.instances[index.value] is None:
        return NOT_FOUND
    return _handle(out, (library.number(handle) + 1) * 100 + index.value + 1)


def _ancestor(library: Library, one: Any, other: Any, level: Any) -> int:
    name = library.host.levels[library.number(one)].split()[library.number(other)]
    return NOT_SUPPORTED if name == "?" else _set(level, LEVELS[name])


def _peer(library: Library, one: Any, other: Any, capability: int, status: Any) -> int:
    pair = frozenset((library.number(one), library.number(other)))
    return _set(status, library.host.nvlink_status if capability == 2 else library.host.peers.get(pair, OK))


def _nvlink_state(library: Library, handle: Any, link: int, active: Any) -> int:
    ends = library.at(handle).nvlinks
    if not ends:
        return NOT_SUPPORTED
    return _set(active, int(ends[link] != "")) if link < len(ends) else INVALID_ARGUMENT


def _nvlink_kind(library: Library, handle: Any, link: int, kind: Any) -> int:
    end = library.at(handle).nvlinks[link]
    return NOT_SUPPORTED if end == "hidden" else _set(kind, {SWITCH: 2, "cpu": 1}.get(end, 0))


def _nvlink_bus(library: Library, handle: Any, link: int, info: Any) -> int:
    end = library.at(handle).nvlinks[link]
    if end == "hidden":
        return NOT_SUPPORTED
    info._obj.busId = b"00000000:C5:00.0" if end in (SWITCH, "cpu") else end.encode()
    return OK


def _fields(library: Library, handle: Any, count: Any, values: Any) -> int:
    gpu = library.at(handle)
    ids = {pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: gpu.speed, pynvml.NVML_FI_DEV_NVLINK_GET_SPEED: gpu.link_speed}
    assert count.value == len(values._obj)
    for value in values._obj:
        speed = ids[value.fieldId] if value.scopeId < max(len(gpu.nvlinks), 1) else Error(INVALID_ARGUMENT)
        value.nvmlReturn = speed.number if isinstance(speed, Error) else OK
        value.valueType, value.value.ullVal = 3, 4711 if isinstance(speed, Error) else speed
    return OK


_FUNCTIONS: dict[str, Callable[..., int]] = {
    "nvmlInitWithFlags": _init,
    "nvmlShutdown": _shutdown,
    "nvmlDeviceGetCount_v2": _count,
    "nvmlDeviceGetHandleByIndex_v2": _by_index,
    "nvmlDeviceGetHandleByUUID": _by_uuid,
    "nvmlDeviceGetName": _text(lambda gpu: gpu.name),
    "nvmlDeviceGetUUID": _text(lambda gpu: gpu.uuid),
    "nvmlDeviceGetPciInfo_v3": _pci,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetUtilizationRates": _rates,
    "nvmlDeviceGetComputeRunningProcesses_v3": _running,
    "nvmlDeviceGetPowerUsage": _value(lambda gpu: gpu.milliwatts() if callable(gpu.milliwatts) else gpu.milliwatts),
    "nvmlDeviceGetEnforcedPowerLimit": _value(lambda gpu: gpu.limit),
    "nvmlDeviceGetTotalEnergyConsumption": _value(lambda gpu: gpu.energy() if callable(gpu.energy) else gpu.energy),
    "nvmlDeviceGetMaxPcieLinkGeneration": _value(lambda gpu: gpu.slot[0]),
    "nvmlDeviceGetMaxPcieLinkWidth": _value(lambda gpu: gpu.slot[1]),
    "nvmlDeviceGetMigMode": _mig_mode,
    "nvmlDeviceGetMaxMigDeviceCount": _value(
        lambda gpu: len(gpu.instances) if gpu.instances else Error(NOT_SUPPORTED)
    ),
    "nvmlDeviceGetMigDeviceHandleByIndex": _instance,
    "nvmlDeviceGetGpuInstanceId": _value(lambda gpu: gpu.ids[0]),
    "nvmlDeviceGetComputeInstanceId": _value(lambda gpu: gpu.ids[1]),
    "nvmlDeviceGetTopologyCommonAncestor": _ancestor,
    "nvmlDeviceGetP2PStatus": _peer,
    "nvmlDeviceGetNvLinkState": _nvlink_state,
    "nvmlDeviceGetNvLinkRemoteDeviceType": _nvlink_kind,
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": _nvlink_bus,
    "nvmlDeviceGetFieldValues": _fields,
}
