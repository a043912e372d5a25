"""Power and utilisation of devices while a block of code runs: sampled in a thread, added up to joules.

    with devices().sampling() as sampling:     begin: first sample: power, utilisation, counter of energy
        pipe.step(...)                         a thread: a sample every 0.1 s
    sampling.usage[0].joules                   end: last sample

The thread calls NVML alone, which lets Python run meanwhile and does not touch CUDA. Nothing that goes wrong in it
reaches the block. Energy is what the GPU's own counter says it drew, where there is one that moved (Volta and later; it
moves some times a second); else mean power times seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from partition.errors import PartitionError
from partition.hardware.gpus import Device, load_of
from partition.hardware.nvml import NvmlQueries, NvmlUnavailable, opened, words_of


class Reading(NamedTuple):
    """A reading: seconds on the clock; None for what NVML did not tell."""

    time: float
    watts: float | None = None
    utilisation: float | None = None
    counter: int | None = None  # of energy, in millijoules


@dataclass(frozen=True)
class Usage:
    """Power, energy and utilisation of a device during a block. A field that NVML did not tell is None.

    Attributes:
        device: which.
        seconds: that the block took.
        joules: that the whole GPU drew, for other processes too.
        watts: mean power.
        peak_watts: the highest sample.
        utilisation: mean share of the time in which a kernel ran, 0 to 1.
        samples: how many readings there are.
        source: where the joules are from, "counter" or "samples", or why there are none.
    """

    device: Device
    seconds: float
    joules: float | None
    watts: float | None
    peak_watts: float | None
    utilisation: float | None
    samples: int
    source: str

    def __str__(self) -> str:
        energy = f"joules unknown ({self.source})" if self.joules is None else f"{self.joules:.4g} J ({self.source})"
        watts = "" if self.watts is None or self.peak_watts is None else (
            f", {self.watts:.4g} W on average, {self.peak_watts:.4g} W at most"
        )
        busy = "" if self.utilisation is None else f", {self.utilisation:.0%} utilised"
        return f"{self.device.label}: {energy}{watts}{busy}, {self.samples} samples in {self.seconds:.4g} s"


class DeviceSampling:
    """A context within which devices are sampled. Without a driver it samples nothing, and `usage` is empty.

    Attributes:
        usage: what each device drew and did; up to now while the block runs.

    Example:
        >>> from partition import devices
        >>> gpus = devices()
        >>> with gpus.sampling() as sampling:
        ...     _ = sum(range(1000))
        >>> len(sampling.usage) == len(gpus)
        True
        >>> joules_per_step = [None if usage.joules is None else usage.joules / 1 for usage in sampling.usage]
    """

    def __init__(
        self, devices: Sequence[Device], every: float = 0.1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not 0.001 <= every <= 3600:
            raise PartitionError(f"every is {every!r}. Give the seconds between two samples, from 0.001 to 3600.")
        self._readers = [_DeviceReader(device) for device in devices]
        self._every = every
        self._clock = clock
        self._open = ExitStack()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-sampling", daemon=True)

    def __enter__(self) -> DeviceSampling:
        try:
            nvml = self._open.enter_context(opened())
        except NvmlUnavailable as error:
            for reader in self._readers:
                reader.source = str(error)
            return self
        for reader in self._readers:
            reader.open(nvml)
        self._sample()
        self._thread.start()
        self._open.callback(self._end)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def usage(self) -> list[Usage]:
        return [reader.usage() for reader in self._readers]

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._sample()

    def _sample(self) -> None:
        for reader in self._readers:
            reader.read(self._clock)


class _DeviceReader:
    """The readings of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.source = "not sampled yet"
        self._queries: NvmlQueries | None = None
        self._samples: list[Reading] = []

    def open(self, nvml: Any) -> None:
        try:
            self._queries = NvmlQueries(nvml, nvml.nvmlDeviceGetHandleByUUID(f"{self.device.uuid}"))
        except nvml.NVMLError as error:
            self.source = words_of(error)

    def read(self, clock: Callable[[], float]) -> None:
        if self._queries is not None:
            counter = self._queries.ask("energy", "nvmlDeviceGetTotalEnergyConsumption")
            watts, utilisation = load_of(self._queries)
            self._samples.append(Reading(clock(), watts, utilisation, counter))

    def usage(self) -> Usage:
        samples = list(self._samples)
        first, last = (samples or [Reading(0.0)])[0], (samples or [Reading(0.0)])[-1]
        seconds, watts = last.time - first.time, _mean([(sample.time, sample.watts) for sample in samples])
        joules, source = None, self.source if self._queries is None else self._queries.unknown.get("power", self.source)
        if first.counter is not None and last.counter is not None and last.counter > first.counter:  # it moves
            joules, source = (last.counter - first.counter) / 1000, "counter"
        elif watts is not None:
            joules, source = watts * seconds, "samples"
        peak = max([sample.watts for sample in samples if sample.watts is not None], default=None)
        busy = _mean([(sample.time, sample.utilisation) for sample in samples])
        return Usage(self.device, seconds, joules, watts, peak, busy, len(samples), source)


def _mean(readings: Sequence[tuple[float, float | None]]) -> float | None:
    """The mean over time, straight lines between the readings that there are."""
    points = [(when, value) for when, value in readings if value is not None]
    if not points:
        return None
    span = points[-1][0] - points[0][0]
    if span <= 0:
        return sum(value for _, value in points) / len(points)
    pairs = zip(points, points[1:])
    return sum((end - begin) * (first + last) / 2 for (begin, first), (end, last) in pairs) / span
