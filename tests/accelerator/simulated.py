"""A simulated accelerator, "sim", on which each missing wait is an error: built, loaded, given to torch as torch.sim.

    import simulated; simulated.load()       three devices (SIMULATED_DEVICES=n for others), sim:0, sim:1, sim:2

Kernels are the host's and run at once. Streams, events, autograd's threads, generators and the allocator behave as on
CUDA. Loading renames PrivateUse1 for the whole process, and makes "sim" what torch.accelerator finds.

What all devices have, on this one: torch.accelerator.* (current_stream, set_stream, device_index, synchronize,
memory_allocated, max_memory_allocated, reset_peak_memory_stats: exact bytes), torch.Stream(device), torch.Event("sim"),
Tensor.record_stream, pin_memory, torch.Generator(device), torch.autocast("sim"), torch.random.fork_rng(
device_type="sim"), torch.get_device_module("sim").default_generators. Numbers are the CPU's.

What only this one has:

* A use of memory that nothing orders after an earlier one that it conflicts with raises RuntimeError("race: ..."), with
  both stacks. Order comes from streams, events, wait_stream, and from what the host has waited for. Freed memory counts
  as written by the stream of its allocation, so that a missing record_stream is a race; as a destructor cannot raise,
  the next operation or `torch.sim.check()` does.
* A copy with non_blocking=True from pinned memory, or to it, happens as late as it may: to the host when the host has
  waited for it, till then the target is NaN (integers: -1); from the host when the copy is used. Writing pinned
  memory before the host has waited for a copy from there is an error of that wait. (Other memory of the host is copied
  at once, as CUDA does.)
* New memory is NaN, and freed memory is.
* An operation on tensors of several devices raises.
* `with torch.sim.no_synchronisation():` raises where the host waits within an operation (item(), copies that block);
  `torch.sim.host_waits()` counts these.
* `with torch.sim.unchecked():` no races. `with torch.sim.own_hosts():` what one thread of the host has waited for is
  not known to the others, as long as it lasts: stricter than true, where threads tell each other by locks.

Not here: sparse and quantised tensors, fused cells of LSTM and GRU, graph capture.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "sim"
SOURCES = Path(__file__).parent / "device"
BUILD = Path(__file__).parents[2] / "build" / "accelerator"
FLAGS = ["-std=c++20", "-O1", "-fPIC"]


def compiler() -> str | None:
    """The C++ compiler: $CXX, or g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """The library, compiled where sources, torch or compiler are new.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the simulated accelerator needs a C++ compiler: set CXX, or install g++.")
    BUILD.mkdir(parents=True, exist_ok=True)
    common = [torch.__version__, cxx, *FLAGS, *(path.read_text() for path in sorted(SOURCES.glob("*.h")))]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    objects: dict[Path, list[str]] = {}
    for source in sorted(SOURCES.glob("*.cpp")):
        made = BUILD / f"{source.stem}-{_digest([*common, source.read_text()])}.o"
        objects[made] = [cxx, *FLAGS, *includes, "-c", str(source)]
    library = BUILD / f"libsim-{_digest([path.name for path in objects])}.so"
    paths = [option for path in cpp_extension.library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    _make(objects)
    _make({library: [cxx, "-shared", *map(str, objects), *paths, "-ltorch", "-ltorch_cpu", "-lc10"]})
    return library


def _digest(words: list[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _make(commands: dict[Path, list[str]]) -> None:
    """Run the commands of the files that do not exist, all at a time. Several processes may do so."""
    running = []
    for path, command in commands.items():
        if not path.exists():
            part = f"{path}.{os.getpid()}"
            complete = [*command, "-o", part]
            running.append((path, part, subprocess.Popen(complete, stderr=subprocess.PIPE, text=True)))
    failures = []
    for path, part, process in running:
        _, output = process.communicate()
        if process.returncode:
            failures.append(f"{path.name}:\n{output}")
        else:
            os.replace(part, path)
    if failures:
        raise RuntimeError("the simulated accelerator cannot be compiled.\n" + "\n".join(failures))


def load() -> ModuleType:
    """torch.sim; built and registered by the first call."""
    found: ModuleType | None = getattr(torch, NAME, None)
    if found is None:
        torch.ops.load_library(build())
        torch.utils.rename_privateuse1_backend(NAME)
        found = _module()
        torch._register_device_module(NAME, found)
        torch.utils.generate_methods_for_privateuse1_backend()
        atexit.register(torch.ops.sim.set_checks, False)  # no stacks can be gathered when Python ends
        # On PrivateUse1 Module.to() would replace parameters, and untie them. On CUDA it does not.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])  # swapping refuses these; it keeps objects
    return found


# ---------------------------------------------------------------------------------------------------------- torch.sim


def _module() -> ModuleType:
    module = ModuleType(f"torch.{NAME}", __doc__)
    accelerator = torch.accelerator
    module.default_generators = tuple(
        torch.ops.sim.default_generator(index) for index in range(torch.ops.sim.device_count())
    )
    same = {
        "device": accelerator.device_index,
        "device_count": torch.ops.sim.device_count,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "synchronize": accelerator.synchronize,
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "get_device_properties": lambda device=None: SimpleNamespace(name="simulated"),
        "_initialized": True,  # torch.utils.checkpoint asks
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "check": torch.ops.sim.raise_found,
        "host_waits": torch.ops.sim.host_waits,
    }
    of_generators = (get_rng_state, set_rng_state, manual_seed, manual_seed_all)
    for function in (*of_generators, unchecked, own_hosts, no_synchronisation):
        same[function.__name__] = function
    for name, attribute in same.items():
        setattr(module, name, attribute)
    return module


def _generator(device: Any = NAME) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    found: torch.Generator = torch.ops.sim.default_generator(-1 if index is None else index)
    return found


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    _generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(torch.ops.sim.device_count()):
        _generator(index).manual_seed(seed)


@contextmanager
def _switched(switch: Any, on: bool) -> Iterator[None]:
    before = switch(on)
    try:
        yield
    finally:
        switch(before)


def unchecked() -> Any:
    """Within: no race is an error."""
    return _switched(torch.ops.sim.set_checks, False)


def own_hosts() -> Any:
    """Within: what one thread of the host has waited for is not known to the others."""
    return _switched(torch.ops.sim.set_own_hosts, True)


def no_synchronisation() -> Any:
    """Within: where the host waits for a device in an operation is an error."""
    return _switched(torch.ops.sim.set_host_may_wait, False)


if __name__ == "__main__":
    print(build() if compiler() else "There is no C++ compiler, so tests/accelerator will be skipped.")
