"""NVML itself on a machine with NVIDIA's GPUs: `devices()` beside what torch and CUDA say.

    make test-gpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from partition import devices

pytestmark = pytest.mark.gpu

GIB = 2**30
CODE = """
import json, torch
from partition import devices
before = [device.uuid for device in devices()]
assert not torch.cuda.is_initialized()
torch.cuda.init()
print("FOUND", json.dumps([before, [device.uuid for device in devices()], torch.cuda.device_count()]))
"""


@pytest.fixture(autouse=True)
def _started() -> None:
    if torch.version.hip is not None:
        pytest.skip("NVML knows NVIDIA's devices alone")
    torch.cuda.init()


def test_cudas_devices_are_found_with_name_and_memory() -> None:
    found = devices()
    assert len(found) == torch.cuda.device_count()
    for number, device in enumerate(found):
        properties = torch.cuda.get_device_properties(number)
        assert device.index == number and (device.is_mig or f"GPU-{properties.uuid}" == device.uuid)
        assert device.name is not None and properties.name in device.name
        assert device.total_bytes == pytest.approx(properties.total_memory, rel=0.1)
        assert device.free_bytes is not None and 0 < device.free_bytes <= device.total_bytes
        assert device.watts is None or 0 < device.watts < 3000
        assert (device.watts is None) == ("power" in device.unknown)
    assert json.loads(json.dumps(found.to_json()))["visible"][0]["name"] == found[0].name
    print(found)


def test_what_this_process_takes_is_no_longer_free() -> None:
    before = devices()[0].free_bytes
    taken = torch.ones(GIB, dtype=torch.uint8, device="cuda:0")
    after = devices()[0].free_bytes
    assert before is not None and after is not None and before - after >= taken.numel() * 0.9
    assert os.getpid() not in [process.pid for process in devices()[0].others]


@pytest.mark.parametrize("order", ["PCI_BUS_ID", "FASTEST_FIRST"])
@pytest.mark.parametrize("reverse", [False, True])
def test_numbers_before_cuda_starts_are_those_after(order: str, reverse: bool) -> None:
    shown = [str(number) for number in range(torch.cuda.device_count())]
    listed = ",".join(shown[::-1] if reverse else shown)
    known = {**os.environ, "CUDA_DEVICE_ORDER": order, "CUDA_VISIBLE_DEVICES": listed}
    output = subprocess.run([sys.executable, "-c", CODE], env=known, capture_output=True, text=True, check=True).stdout
    before, after, count = json.loads(output.partition("FOUND ")[2])
    assert len(after) == count
    unlike = len({device.name for device in devices()}) > 1
    assert before == after or (order == "FASTEST_FIRST" and unlike)


def test_a_process_with_the_environment_of_a_choice_sees_these_devices_in_this_order() -> None:
    choice = devices().best(torch.cuda.device_count())
    known = {**os.environ, **choice.environment}
    output = subprocess.run([sys.executable, "-c", CODE], env=known, capture_output=True, text=True, check=True).stdout
    before, after, _ = json.loads(output.partition("FOUND ")[2])
    assert before == after == [device.uuid for device in choice.devices]


def test_every_pair_has_a_link_that_agrees_with_cudas_peers() -> None:
    found = devices()
    for one in range(len(found)):
        for other in range(one):
            link = found.link(found[one], found[other])
            assert f"{link}" != "?" and (link.bandwidth is None or link.bandwidth > 1e8)
            assert link.peer in (None, torch.cuda.can_device_access_peer(one, other))


def test_work_draws_joules_and_shows_in_the_utilisation() -> None:
    a = torch.ones(4096, 4096, device="cuda:0")
    with devices().sampling(["cuda:0"]) as sampling:
        for _ in range(20):
            for _ in range(100):
                a = a @ a * 1e-4
            torch.cuda.synchronize()
    (usage,) = sampling.usage
    print(usage)
    if not usage.device.is_mig:
        assert usage.samples >= 2 and usage.joules is not None and usage.watts is not None and usage.joules > 0
        assert usage.joules == pytest.approx(usage.watts * usage.seconds, rel=0.9)
