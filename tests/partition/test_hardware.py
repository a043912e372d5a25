"""`devices()` on recorded hosts: fields, links, CUDA's numbers, choice, tables; and on hosts without a driver."""

from __future__ import annotations

import builtins
import itertools
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_hosts import HOSTS, bus, cube, hgx, mig, pairs, pcie, sockets, unlike, uuid
from recorded_nvml import GIB, GPU_IS_LOST, NO_PERMISSION, NOT_SUPPORTED, SWITCH, Error, Gpu, Host, playing

import scheduler
from partition import PartitionError, Plan, devices, plan
from partition.hardware import links as link_module
from partition.hardware import nvml as nvml_module
from partition.hardware import selection
from partition.hardware.gpus import Device
from partition.hardware.inventory import Devices
from partition.hardware.links import DeviceLink
from partition.hardware.selection import Choice, best_line, why_poor
from pipeline.__main__ import main

BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def found_on(host: Host, **environment: str) -> Devices:
    with playing(host) as library:
        found = devices(environment)
        assert library.opened == 0  # each nvmlInit has its nvmlShutdown
    return found


def numbers(found: Devices) -> list[int]:
    return [device.number for device in found]


def matrix(found: Devices) -> list[str]:
    return [" ".join("-" if a == b else str(found.link(a, b)) for b in found) for a in found]


# -------------------------------------------------------------------------------------------------------------- fields


def test_each_device_says_what_nvml_says() -> None:
    used = [(os.getpid(), GIB), (4711, 3 * GIB), (4712, None)]
    gpu = Gpu(uuid(7), bus(1).lower(), utilisation=37, processes=used, free=70 * GIB, milliwatts=123_456)
    (device,) = found_on(Host([gpu], ["INT"]))
    assert device == Device(
        0, 0, "NVIDIA H100 80GB HBM3", uuid(7), bus(1), 80 * GIB, 70 * GIB, 0.37, tuple(used), 123.456, 700.0,
    )
    assert [process.pid for process in device.others] == [4711, 4712]
    assert {device: 1}[replace(device)] == 1


FIELDS = {
    "name": ("name", ["name"]), "total": ("memory", ["total_bytes", "free_bytes"]),
    "utilisation": ("utilisation", ["utilisation"]), "processes": ("processes", ["processes"]),
    "milliwatts": ("power", ["watts"]), "limit": ("limit", ["watt_limit"]),
}  # fmt: skip
REASONS = {NOT_SUPPORTED: "not supported", NO_PERMISSION: "no permission", GPU_IS_LOST: "gpu is lost",
           13: "function not found", 999: "unknown", 777: "NVML error 777"}


@pytest.mark.parametrize("number", REASONS)
@pytest.mark.parametrize("what", FIELDS)
def test_a_field_that_nvml_does_not_tell_is_none_and_the_table_says_why(what: str, number: int) -> None:
    host = hgx()
    setattr(host.gpus[3], what, Error(number))
    found = found_on(host, **BY_BUS)
    key, fields = FIELDS[what]
    assert all(getattr(found[3], name) is None for name in fields)
    assert found[3].unknown == {key: REASONS[number]} and all(not found[n].unknown for n in range(8) if n != 3)
    rows = [line for line in str(found).splitlines() if line.startswith("cuda:3")]
    assert REASONS[number] in rows[0]
    plain = json.loads(json.dumps(found.to_json()))["visible"][3]
    assert all(plain[name] is None for name in fields) and plain["unknown"] == {key: REASONS[number]}


def test_a_function_that_the_driver_or_nvidia_ml_py_does_not_have_is_one_more_reason(monkeypatch) -> None:
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMigMode")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit")
    assert found_on(hgx())[0].unknown == {"limit": "not in this nvidia-ml-py"}


def test_a_gpu_that_cannot_be_opened_is_hidden_and_leaves_cudas_numbers_unknown() -> None:
    host = sockets()
    host.gpus[2].opens = GPU_IS_LOST
    found = found_on(host, **BY_BUS)
    assert [device.label for device in found] == [f"GPU {n}" for n in (0, 1, 3, 4, 5, 6, 7)]
    assert [(device.label, set(device.unknown.values())) for device in found.hidden] == [("GPU 2", {"gpu is lost"})]
    assert found.notes == ("GPU 2 (gpu is lost): CUDA's numbers of the others are not known.",)
    assert "gpu is lost" in str(found) and str(found.link(found[0], found.hidden[0])) == "?"
    host.gpus[6].opens = GPU_IS_LOST
    found = found_on(host, **BY_BUS)
    assert [device.label for device in found.hidden] == ["GPU 2", "GPU 6"]
    assert str(found.link(*found.hidden)) == "?" and str(found.link(found[0], found[1])) == "PIX"
    with_uuids = found_on(host, CUDA_VISIBLE_DEVICES=f"{uuid(5)},{uuid(1)}")
    assert [device.label for device in with_uuids] == ["cuda:0", "cuda:1"] and numbers(with_uuids) == [5, 1]


# --------------------------------------------------------------------------------------------------------------- links


def test_eight_gpus_behind_switches_are_all_neighbours() -> None:
    found = found_on(hgx())
    assert all(link == DeviceLink(18, link.level, 18 * 26_562e6, True) for link in found.links.values())
    assert matrix(found)[0] == "- " + " ".join(["NV18"] * 7)
    assert found.link(found[0], found[1]).level == 40 and found.link(found[0], found[7]).level == 50


def test_over_two_sockets_and_pcie_alone_links_are_nvmls_levels() -> None:
    assert matrix(found_on(sockets()))[5] == "SYS SYS SYS SYS PIX - NODE NODE"
    assert {link.bandwidth for link in found_on(sockets()).links.values()} == {16e9 / 8 * 128 / 130 * 16}
    found = found_on(pcie())
    assert matrix(found)[0] == "- PHB PHB PHB" and not any(link.peer for link in found.links.values())
    assert found.link(found[0], found[1]).bandwidth == 2 * found.link(found[0], found[2]).bandwidth  # x16, x8


def test_bridges_join_pairs() -> None:
    found = found_on(pairs())
    assert matrix(found) == ["- PHB NV4 SYS", "PHB - SYS NV4", "NV4 SYS - PHB", "SYS NV4 PHB -"]
    assert found.link(found[2], found[0]) == DeviceLink(4, 50, 4 * 14_062e6, True)


def test_a_cube_mesh_has_one_and_two_links() -> None:
    assert matrix(found_on(cube()))[3] == "NV2 NV1 NV2 - SYS SYS SYS NV1"


@pytest.mark.parametrize("end", [SWITCH, "hidden"])
def test_a_switch_that_a_virtual_machine_hides_counts_as_one(end: str) -> None:
    host = hgx()
    for gpu in host.gpus:
        gpu.nvlinks = [end] * 17 + [""]  # the last is inactive
    assert matrix(found_on(host))[0] == "- " + " ".join(["NV17"] * 7)


def test_no_nvlinks_where_the_driver_says_that_switches_do_not_join_the_two() -> None:
    host = hgx()
    host.nvlink_status = 5
    assert matrix(found_on(host))[0] == "- NODE NODE NODE SYS SYS SYS SYS"


def test_nvlinks_to_a_processor_or_to_a_gpu_that_is_not_there_join_no_gpus() -> None:
    host = pairs()
    for gpu in host.gpus:
        gpu.nvlinks = ["cpu", "cpu", "00000000:FF:00.0"]
    assert matrix(found_on(host))[0] == "- PHB SYS SYS"


@pytest.mark.parametrize("speed", [0, Error(NOT_SUPPORTED)])
def test_a_bandwidth_that_nvml_does_not_tell_is_none_not_0(speed: Any) -> None:
    host, slots = pairs(), sockets()
    host.gpus[0].speed = speed
    found = found_on(host)
    assert found.link(found[0], found[2]) == DeviceLink(4, 50, None, True)
    assert "NV4: NVLinks, bandwidth not known" in str(found)
    host.gpus[0].link_speed = 14_062
    assert found_on(host).links[frozenset((0, 2))].bandwidth == 4 * 14_062e6
    slots.gpus[0].slot = (4, speed)
    assert found_on(slots).links[frozenset((0, 1))] == DeviceLink(0, 10, None, True)


@pytest.mark.parametrize(
    ("generation", "gigabytes"), [(1, 4.0), (2, 8.0), (3, 15.75), (4, 31.5), (5, 63.0), (6, 121.0), (7, None)]
)
def test_a_slot_of_16_lanes_has_the_bandwidth_of_its_generation(generation: int, gigabytes: float | None) -> None:
    """The figures are those that are commonly published, rounded."""
    host = pcie()
    for gpu in host.gpus:
        gpu.slot = (generation, 16)
    bandwidth = found_on(host).links[frozenset((0, 1))].bandwidth
    assert bandwidth == (None if gigabytes is None else pytest.approx(gigabytes * 1e9, rel=1e-3))


def test_a_level_that_nvml_does_not_tell_is_a_question_mark() -> None:
    host = sockets()
    host.levels = ["? " * 8] * 8
    host.peers = {frozenset((0, 1)): Error(NOT_SUPPORTED)}
    found = found_on(host)
    assert found.link(found[0], found[1]) == DeviceLink(bandwidth=found.links[frozenset((0, 1))].bandwidth, peer=None)
    assert "?: not told" in str(found)
    assert found.best(2).warnings == ("cuda:0 to cuda:1 (?) is not known.",)


def test_numbers_that_the_code_has_of_nvmls_own() -> None:
    assert {level: name for level, name in link_module._NAMES.items()} == {
        pynvml.NVML_TOPOLOGY_INTERNAL: "INT", pynvml.NVML_TOPOLOGY_SINGLE: "PIX", pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB", pynvml.NVML_TOPOLOGY_NODE: "NODE", pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }  # fmt: skip
    assert pynvml.NVML_P2P_CAPS_INDEX_NVLINK == link_module._NVLINK and pynvml.NVML_P2P_STATUS_OK == 0
    assert pynvml.NVML_P2P_CAPS_INDEX_READ in (0, (0,))
    assert pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON == link_module._COMMON_SPEED
    assert pynvml.NVML_FI_DEV_NVLINK_GET_SPEED == link_module._SPEED_OF_LINK
    assert pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH == link_module._IS_SWITCH
    assert pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN == link_module._IS_UNKNOWN
    assert [pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG,
            pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG] == [1, 2, 3]
    names = {number: nvml_module.words_of(pynvml.NVMLError(number)) for number in nvml_module._NO_DRIVER}
    assert names == {4: "no permission", 9: "driver not loaded", 12: "library not found",
                     18: "lib rm version mismatch"}


# ------------------------------------------------------------------------------------------------------ CUDA's numbers


def test_numbers_by_bus_not_by_nvml() -> None:
    host = sockets()
    order = [3, 0, 7, 1, 6, 2, 5, 4]  # NVML guarantees no order
    host.gpus = [host.gpus[n] for n in order]
    host.levels = [" ".join(row.split()[b] for b in order) for row in (host.levels[a] for a in order)]
    found = found_on(host, **BY_BUS)
    assert [device.uuid for device in found] == [uuid(n) for n in range(8)]
    assert matrix(found) == matrix(found_on(sockets(), **BY_BUS))
    assert found.notes == ()


def seen(text: str | None, count: int = 4) -> list[int]:
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    gpus = [Gpu(uuid(n), bus(n)) for n in range(count)]
    found = found_on(Host(gpus, ["PIX " * count] * count), **BY_BUS, **environment)
    assert sorted(numbers(found) + [device.number for device in found.hidden]) == list(range(count))
    assert [device.label for device in found] == [f"cuda:{n}" for n in range(len(found))]
    return numbers(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, [0, 1, 2, 3]), ("", []), ("-1", []), ("NoDevFiles", []), ("2", [2]), ("3,1", [3, 1]), (" 2 , 0", [2, 0]),
     ("0,2,-1,1", [0, 2]), ("0,9,1", [0]), ("1,1", []), ("0,1,0", []), ("1gpu2,2ampere", [1, 2]), ("0,,1", [0]),
     (uuid(2), [2]), (f"{uuid(2)},{uuid(0)}", [2, 0]), ("GPU-00000003", [3]), ("GPU-0", []),
     (f"{uuid(1)},0", [1]), (f"0,{uuid(1)}", [0]), (f"{uuid(1)},GPU-ffff,{uuid(2)}", [1]),
     (f"{uuid(1)},{uuid(1)}", []), ("GPU-00000001,GPU-00000001-", []), ("MIG-0000", [])],
)  # fmt: skip
def test_cuda_visible_devices(text: str | None, expected: list[int]) -> None:
    assert seen(text) == expected


ENTRIES = st.one_of(
    st.integers(-1, 5).map(str),
    st.sampled_from(["", " 1", "2x", "x", "GPU-", "GPU-0", "GPU-00000002", "MIG-0", *(uuid(n) for n in range(4))]),
)


@given(st.lists(ENTRIES, max_size=4).map(",".join).filter(lambda text: not text.startswith("MIG-")))
def test_cuda_visible_devices_is_read_as_torch_reads_it(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", text)
        parsed: Any = torch.cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        expected = torch.cuda._transform_uuid_to_ordinals(parsed, [uuid(n) for n in range(4)])
    else:
        expected = list(itertools.takewhile(lambda number: number < 4, parsed))
    assert seen(text) == expected


def test_of_unlike_gpus_the_numbers_are_unknown_before_cuda_starts() -> None:
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
        found = found_on(unlike(), **environment)
        assert [device.label for device in found] == ["GPU 0", "GPU 1", "GPU 2"]
        assert "nobody knows its numbers before CUDA starts. Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.notes[0]
        choice = found.best(2)
        assert choice.environment == {"CUDA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(2)}"}
        with pytest.raises(PartitionError, match=r"nobody knows CUDA's number of GPU 1, GPU 2 .*PCI_BUS_ID"):
            choice.names
        untold = replace(choice, devices=[replace(choice.devices[0], uuid=None)])
        with pytest.raises(PartitionError, match="the UUID of GPU 1 is not known. Use `names`."):
            untold.environment
    assert found_on(unlike(), **BY_BUS).best(2).names == ["cuda:1", "cuda:2"]
    assert found_on(unlike(), CUDA_VISIBLE_DEVICES=f"{uuid(2)},{uuid(0)}")[0].uuid == uuid(2)  # no order is asked for
    assert not found_on(unlike(), CUDA_VISIBLE_DEVICES="-1").visible


def test_equal_gpus_are_counted_by_bus_and_that_is_said() -> None:
    assert "its numbers are taken to be those of the PCI bus" in found_on(hgx()).notes[0]
    assert found_on(hgx(), **BY_BUS).notes == ()
    assert found_on(Host([Gpu(uuid(0), bus(0))], ["INT"])).notes == ()


def told_by_torch(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(told))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=told[number][4:]))


def test_where_torch_has_started_cuda_it_tells_the_numbers(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as changed after the start
    told_by_torch(monkeypatch, [uuid(2), uuid(0)])
    with playing(unlike()):
        found = devices()
    assert numbers(found) == [2, 0] and found.best(1).names == ["cuda:0"] and found.notes == ()


def test_no_variable_of_this_process_counts_where_an_environment_is_given(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    told_by_torch(monkeypatch, [uuid(2)])
    assert numbers(found_on(hgx(), CUDA_VISIBLE_DEVICES="5")) == [5]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with playing(hgx()):
        assert numbers(devices()) == [3]


# ----------------------------------------------------------------------------------------------------------------- MIG


def test_instances_of_mig_stand_for_their_gpu() -> None:
    found = found_on(mig(), **BY_BUS)
    assert [device.uuid for device in found] == [uuid(10, "MIG")]
    assert [device.label for device in found.hidden] == ["MIG-0000000b", "MIG-0000000c", "GPU 1"]
    assert found[0].is_mig and found[0].total_bytes == 10 * GIB and found[0].bus == bus(0)
    why = dict.fromkeys(("utilisation", "power", "limit"), "not supported")
    assert found[0].unknown == why and found[0].watts is None
    assert "CUDA shows a process one instance of MIG" in found.notes[0]
    assert found.link(found[0], found.hidden[0]) == DeviceLink(0, 0, None, False)
    matrix = found.to_json()["links"]
    assert [[link and link["name"] for link in row] for row in matrix[::3]] == [
        [None, "INT", "INT", "NODE"], ["NODE", "NODE", "NODE", None]
    ]  # fmt: skip
    assert str(found.link(found[0], found.hidden[2])) == "NODE"  # the NVLinks of the whole GPU are not its parts'


@pytest.mark.parametrize(
    ("text", "expected"),
    [(uuid(12, "MIG"), uuid(12, "MIG")), (f"{uuid(11, 'MIG')},{uuid(10, 'MIG')}", uuid(11, "MIG")),
     ("MIG-0000000b", uuid(11, "MIG")), (f"MIG-{uuid(0)}/4/0", uuid(11, "MIG")), (f"MIG-{uuid(0)}/9/0", None),
     ("MIG-", None), (uuid(1), uuid(1)), (uuid(0), uuid(10, "MIG")), ("1", uuid(1)), ("1,0", uuid(10, "MIG")),
     ("0", uuid(10, "MIG")), ("", None)],
)  # fmt: skip
def test_cuda_visible_devices_with_mig(text: str, expected: str | None) -> None:
    found = found_on(mig(), **BY_BUS, CUDA_VISIBLE_DEVICES=text)
    assert [device.uuid for device in found] == [expected] * (expected is not None)
    assert len(found) + len(found.hidden) == 4 and all(device.label == "cuda:0" for device in found)


def test_the_end_of_a_name_of_an_instance_is_no_beginning_of_another() -> None:
    host = mig()
    host.gpus[0].instances[0].ids, host.gpus[0].instances[2].ids = (1, 0), (1, 1)
    host.gpus[0].instances[3].ids = (1, 10)
    found = found_on(host, CUDA_VISIBLE_DEVICES=f"MIG-{uuid(0)}/1/1")
    assert [device.uuid for device in found] == [uuid(11, "MIG")]


def test_a_gpu_in_mig_mode_without_instances_is_no_device() -> None:
    host = hgx()
    host.gpus[0].mig = 1
    found = found_on(host, **BY_BUS)
    assert numbers(found) == [1, 2, 3, 4, 5, 6, 7] and [device.number for device in found.hidden] == [0]


def test_where_torch_tells_of_the_whole_gpu_the_variable_says_which_instance(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid(11, "MIG"))
    for told in (uuid(0), uuid(11, "MIG")):
        told_by_torch(monkeypatch, [told])
        with playing(mig()):
            assert [device.uuid for device in devices()] == [uuid(11, "MIG")]


# -------------------------------------------------------------------------------------------------------------- choice

ALL = {"hgx": range(8), "sockets": range(8), "pcie": range(4), "pairs": (0, 2, 3, 1), "cube": (0, 3, 2, 1, 5, 6, 7, 4)}


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_all_devices_of_a_host(name: str) -> None:
    found = found_on(HOSTS[name](), **BY_BUS)
    choice = found.best(len(found))
    assert [device.number for device in choice.devices] == list(ALL[name]) and choice.is_exact
    assert choice.links == tuple(found.link(a, b) for a, b in zip(choice.devices, choice.devices[1:]))


def test_pairs_and_sockets_stay_together() -> None:
    found = found_on(sockets(), **BY_BUS, CUDA_VISIBLE_DEVICES="0,4,1,5,6,2")
    assert {device.number for device in found.best(3).devices} in ({0, 1, 2}, {4, 5, 6})
    assert found_on(pairs(), **BY_BUS).best(2).names == ["cuda:0", "cuda:2"]


def test_idle_devices_come_before_fast_links() -> None:
    host = pairs()
    host.gpus[0].processes = [(4711, 5 * GIB), (4712, GIB)]
    found = found_on(host, **BY_BUS)
    assert found.best(2).names == ["cuda:1", "cuda:3"] and not found.best(2).warnings
    assert found.best(3).names == ["cuda:1", "cuda:3", "cuda:2"]
    choice = found.best(4)
    assert choice.warnings == (
        "cuda:0 is in use by processes 4711, 4712 (6.0 GiB).",
        "cuda:2 to cuda:3 (PHB) has no NVLink, as others here have.",
    )
    with pytest.warns(UserWarning, match=r"cuda:0 is in use .* as others here have\."):
        assert found.choose(4) == choice
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.choose(2) == found.best(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"processes": [(1, None)]}, "is in use by process 1"), ({"utilisation": 10}, "computes 10% of the time"),
     ({"utilisation": 9}, ""), ({"free": 60 * GIB}, "has 20.0 GiB in use, by no process that is shown here"),
     ({"free": 73 * GIB}, ""), ({"total": 40 * GIB, "free": 39 * GIB}, "has 39.0 GiB free, others up to 79.0 GiB"),
     ({"processes": [(os.getpid(), 30 * GIB)], "free": 49 * GIB}, ""), ({"total": Error(3)}, ""),
     ({"processes": Error(4), "utilisation": Error(3)}, ""),
     ({"processes": Error(4), "utilisation": 50}, "computes 50% of the time"),
     ({"processes": [(os.getpid(), GIB)], "utilisation": 50}, "")],
)  # fmt: skip
def test_why_a_device_is_taken_last(changes: dict[str, Any], words: str) -> None:
    gpu = replace(Gpu(uuid(0), bus(0)), **changes)
    (device,) = found_on(Host([gpu], ["INT"]))
    assert why_poor(device, 79 * GIB) == words
    host = hgx()
    host.gpus[0] = replace(gpu, nvlinks=[SWITCH] * 18)
    expected = list(range(1, 8)) if words else list(range(7))
    assert [device.number for device in found_on(host, **BY_BUS).best(7).devices] == expected


def test_links_between_sockets_and_through_the_host_are_told() -> None:
    assert found_on(sockets(), **BY_BUS).best(8).warnings == (
        "cuda:3 to cuda:4 (SYS) goes from one NUMA node to another, mostly between sockets.",
    )
    assert found_on(pcie(), **BY_BUS).best(2).warnings == (
        "cuda:0 to cuda:1 (PHB) goes through the host's memory: these two are no peers.",
    )
    assert not found_on(hgx(), **BY_BUS).best(8).warnings


RANKS = st.integers(1, 4).map(lambda rank: (float(rank),))


@st.composite
def graphs(draw, least: int, most: int) -> tuple[list[bool], dict[frozenset[int], tuple[float, ...]], int]:
    size = draw(st.integers(least, most))
    is_poor = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ranks = {frozenset(pair): draw(RANKS) for pair in itertools.combinations(range(size), 2)}
    return is_poor, ranks, draw(st.integers(1, min(size, 5)))


def by_trying_all(is_poor, ranks, count) -> tuple[Any, tuple[int, ...]]:
    def badness(line: tuple[int, ...]) -> tuple[int, list[Any]]:
        return sum(is_poor[n] for n in line), sorted((ranks[frozenset(pair)] for pair in zip(line, line[1:])))[::-1]

    return min((badness(line), line) for line in itertools.permutations(range(len(is_poor)), count))


@given(graphs(1, 5))
def test_no_line_of_devices_has_fewer_poor_ones_and_then_faster_links(graph) -> None:
    line, is_exact = best_line(*graph)
    assert is_exact and line == by_trying_all(*graph)[1]


@given(graphs(2, 5), st.integers(1, 6))
def test_of_many_devices_the_line_is_right_or_says_that_it_may_not_be(graph, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_MOST", most)
        line, is_exact = best_line(*graph)
    is_poor, ranks, count = graph
    best = by_trying_all(*graph)[0]
    found = sum(is_poor[n] for n in line), sorted((ranks[frozenset(pair)] for pair in zip(line, line[1:])))[::-1]
    assert found == best if is_exact else found >= best


def test_of_hosts_with_more_devices_the_best_line_is_found() -> None:
    """11 candidates, those that the host does not have poor."""
    for host in (hgx, sockets, cube, pairs, pcie):
        found = found_on(host(), **BY_BUS)
        size, count = len(found), len(found) // 2
        ranks = {pair: link.rank for pair, link in found.links.items()}
        more = {frozenset(pair): ranks.get(frozenset(pair), (9.0,)) for pair in itertools.combinations(range(11), 2)}
        line, _ = best_line([False] * size + [True] * (11 - size), more, count)
        assert line == best_line([False] * size, ranks, count)[0]


def test_a_choice_that_cannot_be_says_why() -> None:
    found = found_on(pairs(), **BY_BUS)
    for count in (0, 5, -1, 2.0, True):
        with pytest.raises(PartitionError, match=rf"cannot choose {count} of 4 visible devices \(cuda:0, .*1 to 4"):
            found.choose(count)
    empty = found_on(pairs(), CUDA_VISIBLE_DEVICES="-1")
    with pytest.raises(PartitionError, match=r"0 visible devices \(none\)\. CUDA_VISIBLE_DEVICES leaves this process"):
        empty.choose(1)
    with pytest.raises(PartitionError, match="cuda:1 and cuda:1 are not two of these devices: cuda:0, cuda:1, cuda:2"):
        found.link(found[1], found[1])


def test_memory_for_a_plan_is_what_is_free_less_a_margin() -> None:
    host = pairs()
    host.gpus[1].free = 7 * GIB
    found = found_on(host, **BY_BUS)
    assert found.caps(0) == [47 * GIB, 7 * GIB, 47 * GIB, 47 * GIB]
    assert found.caps() == [int(free * 0.9) for free in found.caps(0)]
    assert found.best(3).caps(0.5) == [int(23.5 * GIB)] * 3
    for margin in (1, -0.1, float("nan")):
        with pytest.raises(PartitionError, match=rf"margin is {margin}\. Give the share"):
            found.caps(margin)
    host.gpus[1].total = Error(NOT_SUPPORTED)
    with pytest.raises(PartitionError, match=r"the free memory of cuda:1 is not known \(not supported\)"):
        found_on(host, **BY_BUS).caps()


def test_a_plan_for_a_choice_has_its_names_its_free_memory_and_its_bandwidths() -> None:
    model, x = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]), torch.rand(64, 256)

    def planned(choice: Choice, **given: Any) -> Plan:
        return plan(model, x, devices=choice, device="meta", schedules=["1f1b", "zb-v"], chunks=[4], **given)

    choice = found_on(pairs(), **BY_BUS).best(4)
    ways = {(a, b): scheduler.Link(0, 4 * 14_062e6 if {a, b} in ({0, 1}, {2, 3}) else 31.5e9)
            for a, b in itertools.permutations(range(4), 2)}
    assert {pair: round(link.bandwidth, -8) for pair, link in (choice.messages or {}).items()} == {
        pair: round(link.bandwidth, -8) for pair, link in ways.items()
    }
    seconds = planned(choice, flops=1e9)
    assert seconds.devices == ("cuda:0", "cuda:2", "cuda:3", "cuda:1") and seconds.memory == tuple(choice.caps())
    same = planned(choice, flops=1e9, link=choice.messages)
    assert same.expected == seconds.expected and not any("free: NVML" in note for note in seconds.notes)
    assert seconds.expected.step > planned(choice, flops=1e9, link=0.0).expected.step
    assert any("messages between devices count as free: NVML" in note for note in planned(choice).notes)
    host = pairs()
    host.gpus[0].speed = Error(NOT_SUPPORTED)
    untold = found_on(host, **BY_BUS).best(4)
    assert untold.messages is None
    assert any("count as free" in note for note in planned(untold, flops=1e9).notes)


# ------------------------------------------------------------------------------------------------------ without devices


@pytest.mark.parametrize(
    ("number", "words"),
    [(12, "NVIDIA's driver is not installed"), (9, "driver is not loaded"), (18, "restart the machine"),
     (4, "docker run --gpus all"), (999, "NVML does not start: unknown")],
)  # fmt: skip
def test_without_a_driver_words_take_the_place_of_devices(number: int, words: str) -> None:
    host = hgx()
    host.init = number
    found = found_on(host)
    assert not len(found) and not found.hidden and words in str(found)
    assert "Pipes run on the host: devices=['cpu', 'cpu', ...]." in found.notes
    with pytest.raises(PartitionError, match="cannot choose 1 of 0 visible devices"):
        found.choose(1)
    assert found.caps() == [] and json.dumps(found.to_json())


def test_a_driver_without_gpus_says_so(monkeypatch) -> None:
    found = found_on(Host([], []))
    assert found.notes[0] == "No GPUs: NVIDIA's driver shows none."
    with playing(hgx()) as library:
        monkeypatch.setattr(library, "nvmlDeviceGetCount_v2", lambda count: 999, raising=False)
        assert devices().notes[0] == "No GPUs: NVML does not tell how many GPUs there are: unknown."


def test_without_nvidia_ml_py_words_say_what_to_install(monkeypatch) -> None:
    real = builtins.__import__

    def no_pynvml(name: str, *rest: Any) -> Any:
        if name == "pynvml":
            raise ModuleNotFoundError("No module named 'pynvml'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_pynvml)
    assert "(No module named 'pynvml'): pip install nvidia-ml-py" in devices().notes[0]
    monkeypatch.undo()
    monkeypatch.delattr(pynvml, "nvmlInit")
    assert "hidden by another pynvml" in devices().notes[0]


@pytest.mark.parametrize(
    ("kind", "hip", "words"),
    [("xpu", None, "2 devices of kind 'xpu', which NVML does"), ("cuda", "6.4", "2 devices AMD's (ROCm), which NVML"),
     ("cuda", None, "2 devices of kind 'cuda', which NVML does")],
)  # fmt: skip
def test_devices_of_other_makes_are_told_of(monkeypatch, kind: str, hip: str | None, words: str) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "hip", hip)
    host = hgx()
    host.init = 12
    assert words in found_on(host).notes[1] and f"devices=['{kind}:0', ...]" in found_on(host).notes[1]


def test_a_torch_without_cuda_can_use_none_and_is_told() -> None:
    with playing(hgx()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        assert "This torch is built without CUDA: it can use none of these devices." in devices({}).notes


def test_looking_starts_no_cuda(monkeypatch) -> None:
    for name in ("_lazy_init", "init", "get_device_properties", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("CUDA was asked"))
    found = found_on(hgx())
    found.best(8), found.caps(), str(found), found.to_json()
    with playing(hgx()):
        devices()


# ------------------------------------------------------------------------------------------------------- command, pages


def test_the_command_shows_tables_and_json(capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    host = pairs()
    host.gpus[2].processes = [(4711, 30 * GIB)]
    with playing(host):
        assert main(["devices", "--choose", "3", "--margin", "0.5"]) == 0
        shown = capsys.readouterr().out
        assert main(["devices", "--choose", "3", "--json"]) == 0
        plain = json.loads(capsys.readouterr().out)
        assert main(["devices", "--choose", "3", "--env"]) == 0
        out, err = capsys.readouterr()
        assert out == f"CUDA_VISIBLE_DEVICES={uuid(0)},{uuid(2)},{uuid(3)}\n"
        assert err.startswith("warning: cuda:1 is in use") and len(err.splitlines()) == 2
        for more in ([], ["--choose", "1", "--json"]):
            assert main(["devices", "--env", *more]) == 2
            assert "add --choose N, drop --json" in capsys.readouterr().err
        assert main(["devices", "--choose", "4"]) == 2
        assert "cannot choose 4 of 3 visible devices (cuda:0, cuda:1, cuda:2)" in capsys.readouterr().err
        assert main(["devices", "--choose", "1", "--margin", "2"]) == 2
        assert "margin is 2.0" in capsys.readouterr().err
        found = devices()
    assert "4711 (30.0 GiB)" in shown and "GPU 1 (hidden)" in shown
    assert "stages on cuda:0 --NV4-- cuda:1 --PHB-- cuda:2 (no order is better)" in shown
    assert "memory for a plan: 23.5 GiB, 23.5 GiB, 23.5 GiB; 50% of what is free is kept back" in shown
    assert f"CUDA_VISIBLE_DEVICES={uuid(0)},{uuid(2)},{uuid(3)}" in shown
    assert "warning: cuda:1 is in use by process 4711 (30.0 GiB)." in shown
    choice = plain.pop("choice")
    assert plain == found.to_json() and choice["devices"] == ["cuda:0", "cuda:1", "cuda:2"]
    assert choice["caps"] == found.caps() and choice["links"] == ["NV4", "PHB"] and choice["is_exact"]


def test_the_command_on_a_host_without_a_driver_and_with_memory_untold(capsys, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    host = Host([replace(Gpu(uuid(0), bus(0)), total=Error(NOT_SUPPORTED))], ["INT"])
    with playing(host):
        assert main(["devices", "--choose", "1"]) == 0
    assert "memory for a plan: not told; 10%" in capsys.readouterr().out
    host.init = 12
    with playing(host):
        assert main(["devices"]) == 0
    assert capsys.readouterr().out.startswith("No GPUs: NVIDIA's driver is not installed")


def test_what_the_page_shows_is_what_a_recorded_host_gives() -> None:
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    host = pairs()
    host.gpus[1].processes, host.gpus[1].free = [(4711, 30 * GIB)], 17 * GIB
    assert str(found_on(host, **BY_BUS)) in text
