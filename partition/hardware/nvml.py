"""Answers of NVIDIA's management library (NVML), and why one is lacking.

    with opened() as nvml:
        queries = NvmlQueries(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
        queries.ask("power", "nvmlDeviceGetPowerUsage")  ──► milliwatts, or None and queries.unknown["power"]

A question that a device, a driver, a container or an instance of MIG does not answer is no error here. The names are
those of nvidia-ml-py, which calls the driver's library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NvmlUnavailable(Exception):
    """NVML cannot be asked at all; the words say why."""


@contextmanager
def opened() -> Iterator[Any]:
    """Within: the module `pynvml`, initialised.

    Raises:
        NvmlUnavailable: it is not installed, there is no driver, or the driver refuses.
    """
    try:
        import pynvml as nvml

        init, error = nvml.nvmlInit, nvml.NVMLError
    except (ImportError, AttributeError) as reason:
        raise NvmlUnavailable(f"nvidia-ml-py is not installed, or hidden by another pynvml ({reason}): "
                              "pip install nvidia-ml-py") from reason
    try:
        init()
    except error as reason:
        raise NvmlUnavailable(_NO_DRIVER.get(reason.value, f"NVML does not start: {words_of(reason)}")) from reason
    try:
        yield nvml
    finally:
        try:
            nvml.nvmlShutdown()
        except error:
            pass  # the driver went away meanwhile


class NvmlQueries:
    """Questions to NVML about one device.

    Attributes:
        handle: of the device, or of an instance of MIG.
        unknown: for each thing that it did not answer, why, in a few words.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self.handle = handle
        self.unknown: dict[str, str] = {}

    def ask(self, name: str, function: str, *arguments: Any) -> Any:
        """The answer of a function of pynvml; None if there is none, and `unknown[name]` says why."""
        try:
            return getattr(self._nvml, function)(self.handle, *arguments)
        except AttributeError:
            self.unknown[name] = "not in this nvidia-ml-py"
        except self._nvml.NVMLError as error:
            self.unknown[name] = words_of(error)
        except getattr(self._nvml, "NVMLLibraryMismatchError", ()):  # of three functions, and no NVMLError
            self.unknown[name] = "function not found"
        return None


def words_of(error: Exception) -> str:
    """The words in the name of one of pynvml's errors, or its number.

    >>> from pynvml import NVMLError
    >>> words_of(NVMLError(3)), words_of(NVMLError(15)), words_of(NVMLError(1234))
    ('not supported', 'gpu is lost', 'NVML error 1234')
    """
    _, _, name = type(error).__name__.partition("_")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() or f"NVML error {getattr(error, 'value', '?')}"


_NO_DRIVER = {  # by NVML_ERROR_...
    4: "NVML may not talk to the driver: no permission. In a container, pass the GPUs in (docker run --gpus all)",
    9: "NVIDIA's driver is not loaded",
    12: "NVIDIA's driver is not installed (no libnvidia-ml.so.1)",
    18: "NVIDIA's driver and its library differ in version: after an update of the driver, restart the machine",
}
