"""The exact cut: stages on devices of their own speed and memory, with messages between them.

    layers: work, state, saved, read, message ─┐
    stages: speed, memory, chunks held ────────┼─► windows ─► fastest, evenest ─► balance
    links between them ────────────────────────┘                 ▲           │
                                                                 └─ sharing ◄┘  several stages on one device

    time(s, i, j)  = work(i, j) / speed[s] + message at cut i + message at cut j
    bytes(s, i, j) = state(i, j) + kept[s] x saved(i, j) + inputs[s] x read(i, j)            <= memory[s]

The slowest stage is as fast as can be, exactly, but for the rounding of sums of floats; of such balances it is the one
with the smallest sum of squared times.
"""

from collections.abc import Iterable, Sequence
from math import inf

import numpy

from partition.contiguous import check_stages
from partition.cuts.fastest import furthest
from partition.cuts.layers import Layers, layers_of
from partition.cuts.sharing import loosest_caps, shared
from partition.cuts.windows import DeviceStages, HeldChunks, StageSpec, Windows
from partition.errors import PartitionError
from partition.profiles.profile import Profile
from scheduler import Link


def cut(
    profile: Profile, stages: int | Sequence[StageSpec], latency: float = 0.0, bandwidth: float = inf,
    lane_of: Sequence[int] | None = None,
) -> list[int]:  # fmt: skip
    """Cut profiled layers so that the slowest stage is as fast as can be, and each fits its device.

    A stage takes F and B of a chunk, and the messages at its two ends, there and back.

    Args:
        profile: of the layers, for one chunk.
        stages: how many, or a StageSpec for each.
        latency: of a message, in the unit of the profile.
        bandwidth: bytes of a message in one unit of time.
        lane_of: the device of each stage, by a number, where some have several: these stages hold together what their
            device may, which each of their specs says. None: each stage has a device of its own.

    Returns:
        Layers per stage. No other balance that fits has a faster slowest stage; where several are as fast, and each
        stage has a device of its own, it is the one with the smallest sum of squared times. Exact but for the rounding
        of sums of floats. Where devices have several stages, the search for ways to split their memory ends after
        1,000: then it is the best that was found.

    Raises:
        PartitionError: there are fewer layers than stages, or no balance fits: the words say which stage cannot hold
            what. Or none is known to fit, after 1,000 ways to split the memory of devices.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from partition import StageSpec, cut, profile
        >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)])
        >>> layers = profile(model, torch.rand(8, 64), device="meta")
        >>> cut(layers, 3), cut(layers, [StageSpec(speed=2), StageSpec(), StageSpec()])
        ([3, 3, 3], [5, 2, 2])
    """
    if not isinstance(profile, Profile):
        raise PartitionError(f"profile is {profile!r}. Give what partition.profile(module, sample) returned.")
    specs = list(stages) if isinstance(stages, Iterable) else [StageSpec()] * check_stages(stages, len(profile.layers))
    if any([not isinstance(spec, StageSpec) for spec in specs]):
        raise PartitionError(f"stages is {specs}. Give the number of stages, or a StageSpec for each.")
    layers = layers_of(profile)
    link = Link(latency, bandwidth)
    numbers = list(range(len(specs)) if lane_of is None else lane_of)
    if len(numbers) != len(specs):
        raise PartitionError(f"lane_of has {len(numbers)} numbers for {len(specs)} stages. Give one for each.")
    lanes = []
    for number in dict.fromkeys(numbers):
        hosted = tuple([stage for stage, lane in enumerate(numbers) if lane == number])
        memory = {specs[stage].memory for stage in hosted}
        if len(memory) > 1:
            raise PartitionError(
                f"stages {hosted} share a device, but their specs say that it has {sorted(memory)} bytes. Give each of "
                f"them the device's memory."
            )
        lanes.append(
            DeviceStages(hosted, memory.pop(), (tuple([HeldChunks(specs[s].kept, specs[s].inputs) for s in hosted]),))
        )
    messages = [2 * link.time(size) for size in layers.message]
    between = [[0.0] * len(messages) if device == next_device else messages
               for device, next_device in zip(numbers, numbers[1:])]  # fmt: skip
    return cut_layers(layers, specs, between, lanes)


def cut_layers(
    layers: Layers,
    specs: Sequence[StageSpec],
    messages: Sequence[Sequence[float]] = (),
    lanes: Sequence[DeviceStages] = (),
    splits: int = 1000,
) -> list[int]:  # fmt: skip
    """Cut layers so that the slowest stage is as fast as can be.

    Args:
        layers: all of them.
        specs: of the stages.
        messages: for each boundary of two stages, the time of a chunk's messages there at each cut; none: no time.
        lanes: devices, with the memory that their stages share; none: they hold any amount.
        splits: of the memory of shared devices to try at the most, before the best that is known is taken.

    Returns:
        Layers per stage.

    Raises:
        PartitionError: there are fewer layers than stages, no balance fits, or none is known to fit.
    """
    check_stages(len(specs), len(layers.work))
    of_boundaries = {id(times): ("messages", times) for times in messages}
    for name, times in (("work", layers.work), *of_boundaries.values()):
        wrong = ~(numpy.isfinite(times) & (numpy.asarray(times) >= 0))
        if wrong.any():
            index = int(wrong.argmax())
            raise PartitionError(
                f"{name} must be finite and not negative, but {name}[{index}] is {times[index]}. Measure again, or "
                f"replace what is wrong: a layer that costs nothing is 0."
            )
    windows = Windows(layers, specs, messages, lanes)
    result = shared(windows, splits)
    if result.balance:
        return list(result.balance)
    if result.bound < inf:
        raise PartitionError(
            f"no balance is known to fit: devices with several stages hold too much in each of {splits} ways to split "
            f"their memory. {_REMEDY}"
        )
    raise PartitionError(_unfit(windows, [spec.memory for spec in specs]))


def _unfit(windows: Windows, memory: Sequence[float]) -> str:
    """The reason that nothing fits, in words. `memory`: of each stage's device."""
    ends = furthest(windows, loosest_caps(windows))
    if 0 in ends:
        stage = ends.index(0)
        layer = ends[stage - 1] if stage else 0
        reason = f"stage {stage} cannot hold layer {layer} alone in {memory[stage]:.0f} bytes"
    elif ends[-1] < windows.layers:
        reason = (
            f"{len(memory)} stages as long as their memory allows ({max(memory):.0f} bytes at the most) end at layer "
            f"{ends[-1]} of {windows.layers} at the furthest"
        )
    else:
        reason = "the stages of a device hold too much together, however layers are cut and its memory is split"
    return f"no balance fits: {reason}. {_REMEDY}"


_REMEDY = "Recompute activations, take more chunks or more devices, or an optimizer that keeps less."
