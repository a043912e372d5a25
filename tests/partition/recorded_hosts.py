"""Hosts composed from documented topologies, as nvidia-smi topo -m and NVML tell of them. (No machine was recorded.)

    hgx         8 GPUs that 4 NVSwitches join, 18 NVLinks each, 4 on each socket        DGX H100
    sockets     8 GPUs over PCIe switches, 4 on each socket, no NVLink                  two-socket servers with L40S
    pcie        4 GPUs at one host bridge, no peers                                     workstations with RTX 4090
    pairs       4 GPUs, two and two with NVLink bridges                                 workstations with RTX A6000
    cube        8 GPUs in a hybrid cube mesh of 6 NVLinks each                          DGX-1 with V100
    unlike      a GPU for the display first on the bus, then two for computing
    mig         3 instances on the first of two A100
"""

from __future__ import annotations

from typing import Any

from recorded_nvml import GIB, NOT_SUPPORTED, SWITCH, Error, Gpu, Host, hidden_mig

A6000: dict[str, Any] = dict(
    name="NVIDIA RTX A6000", total=48 * GIB, free=47 * GIB, slot=(4, 16), limit=300_000, milliwatts=24_000
)


def uuid(number: int, kind: str = "GPU") -> str:
    return f"{kind}-{number:08x}-aaaa-bbbb-cccc-0123456789ab"


def bus(number: int) -> str:
    return f"00000000:{0x10 + 0x0b * number:02X}:00.0"


def two_sockets(near: str) -> list[str]:
    """4 and 4: within a socket `near` in pairs and NODE between the pairs, SYS between the sockets."""
    def level(one: int, other: int) -> str:
        if one == other:
            return "INT"
        return near if one // 2 == other // 2 else "NODE" if one // 4 == other // 4 else "SYS"

    return [" ".join(level(one, other) for other in range(8)) for one in range(8)]


def hgx() -> Host:
    return Host([Gpu(uuid(n), bus(n), nvlinks=[SWITCH] * 18) for n in range(8)], two_sockets("NODE"))


def sockets() -> Host:
    gpus = [
        Gpu(uuid(n), bus(n), "NVIDIA L40S", 45 * GIB, 44 * GIB, slot=(4, 16), limit=350_000, milliwatts=35_000)
        for n in range(8)
    ]
    return Host(gpus, two_sockets("PIX"))


def pcie() -> Host:
    card: dict[str, Any] = dict(name="NVIDIA GeForce RTX 4090", total=24 * GIB, free=23 * GIB, limit=450_000)
    gpus = [Gpu(uuid(n), bus(n), slot=(4, 16 if n < 2 else 8), **card) for n in range(4)]
    pairs = {frozenset((a, b)): 2 for a in range(4) for b in range(a)}  # GPU not supported
    return Host(gpus, ["PHB " * 4] * 4, nvlink_status=5, peers=pairs)


def pairs() -> Host:
    """0 and 2, 1 and 3 have bridges of 4 NVLinks."""
    ends = [[bus((n + 2) % 4)] * 4 for n in range(4)]
    gpus = [Gpu(uuid(n), bus(n), nvlinks=ends[n], speed=14_062, **A6000) for n in range(4)]
    return Host(gpus, ["INT PHB SYS SYS", "PHB INT SYS SYS", "SYS SYS INT PHB", "SYS SYS PHB INT"])


CUBE = """
- 1 1 2 2 0 0 0
1 - 2 1 0 2 0 0
1 2 - 2 0 0 1 0
2 1 2 - 0 0 0 1
2 0 0 0 - 1 1 2
0 2 0 0 1 - 2 1
0 0 1 0 1 2 - 2
0 0 0 1 2 1 2 -
"""


def cube() -> Host:
    rows = [row.split() for row in CUBE.strip().splitlines()]
    ends = [[bus(other) for other, count in enumerate(row) if count != "-" for _ in range(int(count))] for row in rows]
    card: dict[str, Any] = dict(name="Tesla V100-SXM2-32GB", total=32 * GIB, free=31 * GIB, limit=300_000)
    gpus = [Gpu(uuid(n), bus(n), nvlinks=ends[n], speed=25_781, slot=(3, 16), **card) for n in range(8)]
    return Host(gpus, two_sockets("PIX"))


def unlike() -> Host:
    gpus = [
        Gpu(uuid(0), bus(0), "NVIDIA T400 4GB", 4 * GIB, 3 * GIB, slot=(3, 16), limit=Error(NOT_SUPPORTED)),
        Gpu(uuid(1), bus(1), **A6000),
        Gpu(uuid(2), bus(2), **A6000),
    ]
    return Host(gpus, ["INT PIX PHB", "PIX INT PHB", "PHB PHB INT"])


def mig() -> Host:
    name = "NVIDIA A100-SXM4-40GB"
    part: dict[str, Any] = dict(name=f"{name} MIG 2g.10gb", total=10 * GIB, free=9 * GIB)
    parts = [hidden_mig(Gpu(uuid(10 + n, "MIG"), ids=(3 + n, 0), **part)) for n in range(3)]
    whole: dict[str, Any] = dict(name=name, total=40 * GIB, free=39 * GIB, nvlinks=[SWITCH] * 12, slot=(4, 16))
    first = Gpu(uuid(0), bus(0), mig=1, instances=[*parts[:1], None, *parts[1:]], **whole)
    return Host([first, Gpu(uuid(1), bus(1), mig=0, **whole)], ["INT NODE", "NODE INT"])


HOSTS = {build.__name__: build for build in (hgx, sockets, pcie, pairs, cube, unlike, mig)}
