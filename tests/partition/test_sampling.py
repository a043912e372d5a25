"""Sampling of power and utilisation on recorded hosts: means, joules, threads, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_hosts import bus, hgx, mig, unlike, uuid
from recorded_nvml import GPU_IS_LOST, NOT_SUPPORTED, Error, Gpu, Host, playing

from partition import PartitionError, devices
from partition.hardware.sampling import DeviceSampling, Usage

NEVER = 3600.0  # seconds between samples: the first and the last alone
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def one_after_the_other(values: Sequence[Any]) -> Callable[[], Any]:
    return iter(values).__next__


def sampled(gpu: Gpu, times: Sequence[float]) -> Usage:
    """A sample at each of these times, of which the first and the last are those of the context."""
    with playing(Host([gpu], ["INT"])) as library:
        sampling = DeviceSampling(devices({}).visible, NEVER, one_after_the_other(times))
        with sampling:
            for _ in times[2:]:
                sampling._sample()
        assert library.opened == 0
        (usage,) = sampling.usage
    return usage


def test_joules_are_what_the_counter_moved_by() -> None:
    powers, counts = one_after_the_other([0, 100_000, 300_000]), one_after_the_other([5_000_000, 5_012_345])
    usage = sampled(Gpu(uuid(0), bus(0), milliwatts=powers, energy=counts, utilisation=40), [1.0, 3.0])
    assert (usage.joules, usage.source, usage.seconds, usage.samples) == (12.345, "counter", 2.0, 2)
    assert (usage.watts, usage.peak_watts, usage.utilisation) == (200.0, 300.0, 0.4)
    shown = "12.35 J (counter), 200 W on average, 300 W at most, 40% utilised, 2 samples in 2 s"
    assert str(usage) == f"cuda:0: {shown}"


@pytest.mark.parametrize("counts", [[5, 5], [9, 3], [Error(NOT_SUPPORTED)] * 2, [5, Error(GPU_IS_LOST)]])
def test_a_counter_that_does_not_move_forward_gives_way_to_samples(counts: list[Any]) -> None:
    powers = one_after_the_other([0, 100_000, 300_000])
    usage = sampled(Gpu(uuid(0), bus(0), milliwatts=powers, energy=one_after_the_other(counts)), [1.0, 3.0])
    assert (usage.joules, usage.source) == (400.0, "samples")


def test_of_readings_at_one_time_the_mean_is_taken() -> None:
    powers = one_after_the_other([0, 100_000, 300_000])
    usage = sampled(Gpu(uuid(0), bus(0), milliwatts=powers, energy=Error(NOT_SUPPORTED)), [1.0, 1.0])
    assert (usage.watts, usage.seconds, usage.joules) == (200.0, 0.0, 0.0)


STEPS = st.lists(st.tuples(st.integers(1, 50), st.none() | st.integers(0, 700)), min_size=2, max_size=8)


@given(STEPS)
def test_mean_power_is_the_area_under_the_known_readings(steps: list[tuple[int, int | None]]) -> None:
    times = [time / 8 for time in accumulate(step for step, _ in steps)]
    readings = [Error(NOT_SUPPORTED) if watts is None else 1000 * watts for _, watts in steps]
    powers = one_after_the_other([0, *readings])  # devices() has the first
    none = Error(NOT_SUPPORTED)
    usage = sampled(Gpu(uuid(0), bus(0), milliwatts=powers, energy=none, utilisation=none), times)
    known = [(time, watts) for time, (_, watts) in zip(times, steps, strict=True) if watts is not None]
    assert usage.samples == len(steps) and usage.seconds == times[-1] - times[0] and usage.utilisation is None
    if not known:
        assert (usage.joules, usage.watts, usage.peak_watts, usage.source) == (None, None, None, "not supported")
        assert "joules unknown (not supported)" in str(usage)
        return
    area = torch.trapezoid(*(torch.tensor(each, dtype=torch.float64) for each in list(zip(*known))[::-1])).item()
    span = known[-1][0] - known[0][0]
    assert usage.watts == pytest.approx(area / span if span else known[0][1])
    assert usage.joules == pytest.approx(usage.watts * usage.seconds) and usage.source == "samples"
    assert usage.peak_watts == max(watts for _, watts in known)


def test_a_thread_samples_while_the_block_runs_and_ends_with_it() -> None:
    enough, taken = threading.Event(), list[str]()

    def power() -> int:
        taken.append(threading.current_thread().name)
        if len(taken) == 6:
            enough.set()
        return 50_000

    with playing(Host([Gpu(uuid(0), bus(0), milliwatts=power)], ["INT"])):
        with devices({}).sampling(every=0.001) as sampling:
            assert enough.wait(60)
            assert sampling.usage[0].samples >= 3 and sampling.usage[0].watts == 50.0
        count = len(taken)
        assert not [thread for thread in threading.enumerate() if thread.name == "penstock-sampling"]
    assert taken[:2] == ["MainThread"] * 2 and "penstock-sampling" in taken  # devices(), the first sample
    assert sampling.usage[0].samples == count - 1 and taken[-1] == "MainThread"


def test_what_the_block_raises_is_raised_and_the_thread_ends() -> None:
    with playing(hgx()) as library:
        with pytest.raises(ZeroDivisionError), devices({}).sampling():
            raise ZeroDivisionError
        assert library.opened == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-sampling"]


def test_a_gpu_that_is_lost_meanwhile_disturbs_nobody() -> None:
    host = hgx()
    with playing(host):
        with devices({}).sampling(every=NEVER) as sampling:
            gone = Error(GPU_IS_LOST)
            host.gpus[1].milliwatts = host.gpus[1].utilisation = host.gpus[1].energy = gone
            host.gpus[2].milliwatts = one_after_the_other([gone] * 9)
            host.gpus[0].energy += 7000
        assert [usage.source for usage in sampling.usage[:3]] == ["counter", "samples", "samples"]
        assert sampling.usage[1].watts == 70.0  # of the first sample
        found = devices({})
        host.gpus[4].opens = GPU_IS_LOST
        which = ["cuda:4", "cuda:4", torch.device("cpu"), torch.device("cuda", 0)]
        with found.sampling(which, every=NEVER) as sampling:
            pass
        assert [(usage.device.label, usage.samples) for usage in sampling.usage] == [("cuda:4", 0), ("cuda:0", 2)]
        lost = sampling.usage[0]
        assert (lost.joules, lost.seconds, lost.source) == (None, 0.0, "gpu is lost")


def test_an_instance_of_mig_has_no_joules_of_its_own() -> None:
    with playing(mig()):
        with devices({}).sampling(every=NEVER) as sampling:
            pass
    (usage,) = sampling.usage
    assert (usage.joules, usage.watts, usage.utilisation, usage.source) == (None, None, None, "not supported")


def test_without_a_driver_nothing_is_sampled() -> None:
    host = hgx()
    with playing(host):
        found = devices({})
        host.init = 9
        with found.sampling(["cuda:1"]) as sampling:
            pass
        assert sampling.usage[0].joules is None and "driver is not loaded" in sampling.usage[0].source
        with devices({}).sampling() as sampling:
            pass
    assert sampling.usage == []


def test_what_cannot_be_sampled_is_refused() -> None:
    with playing(hgx()):
        found = devices({"CUDA_VISIBLE_DEVICES": "0,1", **BY_BUS})
        for which in ("cuda:2", "xpu:0", "cuda"):
            words = rf"cannot sample {which}: the devices that NVML tells of are cuda:0, cuda:1\."
            with pytest.raises(PartitionError, match=words):
                found.sampling([which])
        for every in (0, -1, float("nan"), 1e9):
            with pytest.raises(PartitionError, match=rf"every is {every}\. Give the seconds between two samples"):
                found.sampling(every=every)
    with playing(unlike()), pytest.raises(PartitionError, match="tells of are none. The GPUs are not alike"):
        devices({}).sampling(["cuda:0"])
