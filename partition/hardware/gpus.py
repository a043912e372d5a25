"""GPUs and instances of MIG with what NVML tells of each.

    GPU, MIG off ──► one Unit                 its handle, and its Device: the fields, before CUDA's number is known
    GPU, MIG on  ──► a Unit for each instance (NVML answers few questions about one), none for the GPU itself

A field that NVML does not tell is None, and `Device.unknown` says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from partition.hardware.nvml import NvmlQueries, words_of


class GpuProcess(NamedTuple):
    """A process that computes on a device, and the bytes that it holds there; None where the driver does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Device:
    """A GPU, or an instance of MIG. What NVML did not tell is None.

    Attributes:
        index: the number of CUDA and torch in this process, as in `cuda:0`; None: it has none here, or nobody knows it.
        number: the number of NVML and nvidia-smi, of the whole GPU.
        name: of the model.
        uuid: "GPU-..." or "MIG-...", in all processes and after a restart the same.
        bus: where it is on the PCI bus, "00000000:3B:00.0".
        total_bytes: of its memory.
        free_bytes: that no process holds now.
        utilisation: the share of the last second or less in which a kernel ran, 0 to 1.
        processes: that compute on it, this one too. Of those outside of a container none is seen from within.
        watts: that it draws.
        watt_limit: that the driver holds it to.
        unknown: for each field that is None, why, in a few words.

    Example:
        >>> device = Device(0, 0, "NVIDIA L4", "GPU-1", "00000000:3B:00.0", 24 << 30, 23 << 30, utilisation=0.0)
        >>> device.label, device.is_mig, device.processes
        ('cuda:0', False, None)
    """

    index: int | None
    number: int
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    watts: float | None = None
    watt_limit: float | None = None
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """`cuda:0`; where CUDA's number is not known, what nvidia-smi calls it."""
        if self.index is not None:
            return f"cuda:{self.index}"
        return f"{self.uuid}"[:12] if self.is_mig else f"GPU {self.number}"

    @property
    def is_mig(self) -> bool:
        """Whether it is an instance of MIG, a part of a GPU."""
        return self.uuid is not None and self.uuid.startswith("MIG-")

    @property
    def others(self) -> tuple[GpuProcess, ...]:
        """The processes but this one."""
        return tuple(process for process in self.processes or () if process.pid != os.getpid())


class Unit(NamedTuple):
    """A device as NVML holds it.

    Attributes:
        device: its fields; `index` is not known yet.
        gpu: the handle of the whole GPU, None where it could not be opened.
        gpu_uuid: of the whole GPU.
        alias: of an instance of MIG, its other name, MIG-<uuid of the GPU>/<GPU instance>/<compute instance>.
        is_usable: whether CUDA can compute there: not on a GPU that is lost, nor on one with MIG but no instances.
    """

    device: Device
    gpu: Any
    gpu_uuid: str | None
    alias: str | None = None
    is_usable: bool = True


def read_units(nvml: Any) -> list[Unit]:
    """All devices of the host that NVML shows, in the order of the PCI bus."""
    units = [unit for number in range(nvml.nvmlDeviceGetCount()) for unit in _units(nvml, number)]
    return sorted(units, key=lambda unit: (unit.device.bus is None, unit.device.bus or "", unit.device.number))


def text_of(value: bytes | str) -> str:
    """A text of NVML's: pynvml decodes what functions return, not what stands in their structs."""
    return value.decode() if isinstance(value, bytes) else value


def gib(count: int) -> str:
    """Bytes in words.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{count / 2**30:.1f} GiB"


def load_of(queries: NvmlQueries) -> tuple[float | None, float | None]:
    """The watts that a device draws now, and the share of the last second or less in which a kernel ran."""
    rates = queries.ask("utilisation", "nvmlDeviceGetUtilizationRates")
    return _per_thousand(queries.ask("power", "nvmlDeviceGetPowerUsage")), None if rates is None else rates.gpu / 100


def _units(nvml: Any, number: int) -> Iterator[Unit]:
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError as error:
        yield Unit(Device(None, number, unknown=dict.fromkeys(_FIELDS, words_of(error))), None, None, is_usable=False)
        return
    whole = _read(nvml, gpu, gpu, number)
    instances = list(_instances(nvml, gpu, number, whole))
    mode = NvmlQueries(nvml, gpu).ask("mig", "nvmlDeviceGetMigMode")
    yield from instances or [Unit(whole, gpu, whole.uuid, is_usable=mode is None or not mode[0])]


def _instances(nvml: Any, gpu: Any, number: int, whole: Device) -> Iterator[Unit]:
    queries = NvmlQueries(nvml, gpu)
    for index in range(queries.ask("count", "nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = queries.ask("instance", "nvmlDeviceGetMigDeviceHandleByIndex", index)
        if handle is not None:
            part = NvmlQueries(nvml, handle)
            ids = [part.ask("id", f"nvmlDeviceGet{kind}InstanceId") for kind in ("Gpu", "Compute")]
            alias = None if None in ids else f"MIG-{whole.uuid}/{ids[0]}/{ids[1]}"
            yield Unit(_read(nvml, handle, gpu, number), gpu, whole.uuid, alias)


def _read(nvml: Any, handle: Any, gpu: Any, number: int) -> Device:
    queries = NvmlQueries(nvml, handle)
    ask = queries.ask
    bus = NvmlQueries(nvml, gpu).ask("bus", "nvmlDeviceGetPciInfo")  # of the whole GPU: an instance has none
    memory = ask("memory", "nvmlDeviceGetMemoryInfo")
    watts, utilisation = load_of(queries)
    processes = ask("processes", "nvmlDeviceGetComputeRunningProcesses")
    return Device(
        index=None,
        number=number,
        name=ask("name", "nvmlDeviceGetName"),
        uuid=ask("uuid", "nvmlDeviceGetUUID"),
        bus=None if bus is None else text_of(bus.busId).upper(),
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        utilisation=utilisation,
        processes=None if processes is None else tuple(
            GpuProcess(process.pid, process.usedGpuMemory) for process in processes
        ),
        watts=watts,
        watt_limit=_per_thousand(ask("limit", "nvmlDeviceGetEnforcedPowerLimit")),
        unknown=queries.unknown,
    )


def _per_thousand(value: int | None) -> float | None:
    return None if value is None else value / 1000


_FIELDS = ("name", "uuid", "bus", "memory", "utilisation", "processes", "power", "limit")
