"""Laws of cuts: as good as the best of all balances, under memory caps, messages, unequal devices and sharing."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, product
from math import inf, isclose
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_profiles import models
from torch import nn

from partition import LayerProfile, PartitionError, Profile, StageSpec, balance_costs, cut, profile
from partition.cuts import windows
from partition.cuts.cutting import cut_layers
from partition.cuts.layers import Layers, amounts_of, layers_of
from partition.cuts.windows import DeviceStages, HeldChunks
from partition.profiles.amounts import Bytes, MedianSpread, sum_of_bytes
from partition.profiles.profile import Work


def balances(layers: int, stages: int) -> Iterator[list[int]]:
    """All of them."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in zip((0, *cuts), (*cuts, layers))]


def of_one_stage(specs: Sequence[StageSpec]) -> list[DeviceStages]:
    """A device for each stage, with the memory that its spec says."""
    return [DeviceStages((s,), spec.memory, ((HeldChunks(spec.kept, spec.inputs),),)) for s, spec in enumerate(specs)]


class Case(NamedTuple):
    """A cut to make, in numbers from which `walked` adds up stages layer by layer."""

    works: list[int]
    states: list[Bytes]
    saved: list[Bytes]
    entry: list[int]
    specs: list[StageSpec]
    messages: list[list[int]]
    forward: list[int]
    loss: list[int]
    late: list[Bytes]
    lanes: list[DeviceStages]

    @property
    def layers(self) -> Layers:
        return Layers(self.works, amounts_of(self.states), amounts_of(self.saved), entry=self.entry,
                      forward=self.forward, loss=self.loss, late=amounts_of(self.late))  # fmt: skip

    def walked(self, balance: Sequence[int]) -> list[float]:
        """The times of all stages; [inf] where a device holds too much."""
        stops = list(accumulate(balance))
        parts = [slice(stop - size, stop) for stop, size in zip(stops, balance)]
        for lane in self.lanes:
            for moment in lane.moments:
                taken = sum(
                    sum_of_bytes(self.states[parts[s]]) + self.specs[s].state
                    + held.kept * sum_of_bytes(self.saved[parts[s]])
                    + held.inputs * self.entry[parts[s].start] + held.loss * self.loss[parts[s].start]
                    + held.late * sum_of_bytes(self.late[parts[s]])
                    for s, held in zip(lane.stages, moment)
                )  # fmt: skip
                if taken > lane.memory:
                    return [inf]
        times = []
        for s, (part, spec) in enumerate(zip(parts, self.specs)):
            work = sum(self.works[part]) + spec.recompute * sum(self.forward[part]) + spec.work
            before = self.messages[s - 1][part.start] if s else 0
            behind = self.messages[s][part.stop] if s + 1 < len(self.specs) else 0
            times.append(work / spec.speed + before + behind)
        return times


sizes = st.integers(0, 20)
amounts = st.builds(Bytes, sizes, st.dictionaries(st.integers(0, 3), st.just(8), max_size=2).map(
    lambda shared: tuple(shared.items())))  # fmt: skip
memories = st.sampled_from([inf, 60.0, 120.0, 250.0])


@st.composite
def cases(draw: Any, is_shared: bool = False, most: int = 7) -> Case:
    layers = draw(st.integers(2 if is_shared else 1, most))
    stages = draw(st.integers(min(layers, 1 + is_shared), min(layers, 4)))
    of_layers = {"min_size": layers, "max_size": layers}
    specs = draw(st.lists(st.builds(
        StageSpec, st.sampled_from([0.5, 1.0, 2.0]), memories, st.integers(1, 4), st.integers(0, 2),
        st.integers(0, 5).map(float), st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]),
    ), min_size=stages, max_size=stages))  # fmt: skip
    times = st.lists(st.integers(0, 6), min_size=layers + 1, max_size=layers + 1)
    lanes = of_one_stage(specs)
    if is_shared:
        lane_of = draw(st.lists(st.integers(0, 1), min_size=stages, max_size=stages))
        groups = [tuple(s for s in range(stages) if lane_of[s] == lane) for lane in set(lane_of)]
        moment = st.builds(HeldChunks, *[st.integers(0, most) for most in (3, 2, 1, 2)])
        lanes = [
            DeviceStages(group, draw(memories), tuple(moments))
            for group in groups
            for moments in [draw(st.lists(st.tuples(*[moment] * len(group)), min_size=1, max_size=2))]
        ]
    kinds = (sizes, amounts, amounts, sizes, sizes, sizes, amounts)
    works, states, saved, entry, forward, loss, late = [draw(st.lists(kind, **of_layers)) for kind in kinds]
    messages = draw(st.lists(times, min_size=stages - 1, max_size=stages - 1))
    return Case(works, states, saved, entry, specs, messages, forward, loss, late, lanes)


@pytest.mark.parametrize(("bandwidth", "found"), [(10.0, [1, 2]), (5.0, [2, 1])])
def test_a_message_is_paid_for_there_and_back_at_both_ends(bandwidth: float, found: list[int]) -> None:
    """Layers of 10, 4 and 4; behind the first 16 bytes: 10 + 2 * 16 / bandwidth beside 14 for the first two."""
    work = Work(*[MedianSpread(amount) for amount in (0.0, 0.0, 0.0, 0.0)])
    layers = [
        LayerProfile(f"{number}", "Layer", work._replace(forward=MedianSpread(cost)), Bytes(0), Bytes(0), Bytes(0), 0,
                     Bytes(0), 0, size)
        for number, (cost, size) in enumerate([(10.0, 16), (4.0, 0), (4.0, 0)])
    ]  # fmt: skip
    assert cut(Profile(tuple(layers), 4, "s", "cpu", ()), 2, bandwidth=bandwidth) == found


@settings(max_examples=120)
@given(cases())
def test_no_balance_that_fits_has_a_faster_slowest_stage_and_none_of_these_is_evener(case: Case) -> None:
    every = [case.walked(balance) for balance in balances(len(case.works), len(case.specs))]
    best = min(map(max, every))
    if best == inf:
        with pytest.raises(PartitionError, match="no balance fits"):
            cut_layers(case.layers, case.specs, case.messages, case.lanes)
        return
    found = cut_layers(case.layers, case.specs, case.messages, case.lanes)
    assert len(found) == len(case.specs) and sum(found) == len(case.works) and min(found) >= 1
    times = case.walked(found)
    assert isclose(max(times), best)
    assert isclose(sum(t**2 for t in times), min(sum(t**2 for t in each) for each in every if max(each) <= best))


@settings(max_examples=120)
@given(cases(is_shared=True))
def test_stages_of_one_device_share_its_memory(case: Case) -> None:
    best = min(max(case.walked(balance)) for balance in balances(len(case.works), len(case.specs)))
    if best == inf:
        with pytest.raises(PartitionError, match="no balance fits"):
            cut_layers(case.layers, case.specs, case.messages, case.lanes)
        return
    found = cut_layers(case.layers, case.specs, case.messages, case.lanes)
    assert isclose(max(case.walked(found)), best)


def by_all_windows(
    layers: Layers, specs: Sequence[StageSpec], messages: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """The slowest stage and the sum of squares of the best balance, without memory: window by window."""
    total, sums = len(layers.work), [0.0, *accumulate(layers.work)]
    none = [0.0] * (total + 1)
    ways = [none, *(messages or [none] * (len(specs) - 1)), none]

    def time(stage: int, start: int, stop: int) -> float:
        return (sums[stop] - sums[start]) / specs[stage].speed + ways[stage][start] + ways[stage + 1][stop]

    def fold(add: Callable[[float, float], float], limit: float) -> float:
        best = {0: 0.0}
        for stage in range(len(specs)):
            best = {
                stop: min(add(value, t) if t <= limit else inf for start, value in best.items() if start < stop
                          for t in [time(stage, start, stop)])
                for stop in range(stage + 1, total + 1)
            }  # fmt: skip
        return best[total]

    slowest_ = fold(max, inf)
    return slowest_, fold(lambda value, t: value + t**2, slowest_ * (1 + 1e-12))


@pytest.mark.parametrize("kind", ["equal", "uniform", "heavy tail", "one giant", "mostly nothing"])
def test_many_layers_are_cut_as_well_as_few(kind: str) -> None:
    source = random.Random(kind)
    draw: dict[str, Callable[[], float]] = {
        "equal": lambda: 7.0, "uniform": lambda: source.randint(1, 100),
        "heavy tail": lambda: source.paretovariate(0.7),
        "one giant": lambda: source.choice([1.0, 2.0]), "mostly nothing": lambda: source.choice([0.0, 0.0, 0.0, 5.0]),
    }  # fmt: skip
    for stages, with_messages, speeds in product((3, 12), (False, True), ((1.0,), (1.0, 2.0, 0.5))):
        works = [draw[kind]() for _ in range(70)]
        if kind == "one giant":
            works[40] = 400.0
        messages = [[source.randint(0, 30) for _ in range(71)] for _ in range(stages - 1)] if with_messages else []
        specs = [StageSpec(source.choice(speeds)) for _ in range(stages)]
        layers = Layers(works)
        found = cut_layers(layers, specs, messages)
        ends = [0, *accumulate(found)]
        ways = [[0.0] * 71, *(messages or [[0.0] * 71] * (stages - 1)), [0.0] * 71]
        times = [sum(works[a:b]) / spec.speed + ways[s][a] + ways[s + 1][b]
                 for s, (spec, a, b) in enumerate(zip(specs, ends, ends[1:]))]  # fmt: skip
        best, squares = by_all_windows(layers, specs, messages)
        assert isclose(max(times), best, rel_tol=1e-9) and isclose(sum(t**2 for t in times), squares, rel_tol=1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 12))
def test_on_equal_devices_the_slowest_stage_is_that_of_exact_arithmetic(works: list[float], stages: int) -> None:
    stages = min(stages, len(works))
    found, exact = [
        max(sum(works[stop - size:stop]) for size, stop in zip(balance, accumulate(balance)))
        for balance in (cut_layers(Layers(works), [StageSpec()] * stages), balance_costs(works, stages))
    ]  # fmt: skip
    assert isclose(found, exact, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize("name", models())
def test_tables_of_layers_have_the_bytes_of_all_stages_of_a_profile(name: str) -> None:
    model, x = models()[name]
    measured = profile(model, x, device="meta", optimizer=2, loss_fn=lambda out, _: out.square().sum(), target=x)
    tables = layers_of(measured).tables
    for start, stop in combinations(range(len(model) + 1), 2):
        stage = measured.stage(start, stop)
        found = tables[:, start, stop].tolist()
        assert found == [stage.state, stage.saved, stage.read, measured.loss_bytes(start), stage.late]


@pytest.mark.parametrize("name", models())
def test_bytes_of_windows_are_those_of_the_stages_of_a_profile(name: str) -> None:
    model, x = models()[name]
    measured = profile(model, x, device="meta", optimizer=2)
    lane = DeviceStages((0, 1), 1e18, ((HeldChunks(3, 2), HeldChunks(3, 2)),))
    sums = windows.Windows(layers_of(measured), [StageSpec()] * 2, (), [lane])
    for cut_ in range(1, len(model)):
        stages = [measured.stage(0, cut_), measured.stage(cut_, len(model))]
        wanted = [stage.state + 3 * stage.saved + 2 * stage.read for stage in stages]
        assert sums.bytes([cut_, len(model) - cut_]).tolist() == wanted


def test_stages_with_work_of_their_own_and_layers_without_any_are_cut() -> None:
    specs = [StageSpec(0.5), StageSpec(0.5), StageSpec(0.5, work=1.0), StageSpec(0.5)]
    found = cut_layers(Layers([0] * 7), specs, [[0] * 8] * 3)
    assert sum(found) == 7 and min(found) >= 1


def test_what_does_not_fit_is_said_of_a_stage_and_a_layer() -> None:
    layers = Layers([1, 1, 1], amounts_of([Bytes(4), Bytes(90), Bytes(4)]), amounts_of([Bytes(0)] * 3))
    with pytest.raises(PartitionError, match="no balance fits: stage 1 cannot hold layer 1 alone in 50 bytes. Recompu"):
        cut_layers(layers, [StageSpec(memory=50)] * 2, (), of_one_stage([StageSpec(memory=50)] * 2))
    layers = Layers([1] * 6, amounts_of([Bytes(40)] * 6), amounts_of([Bytes(0)] * 6))
    with pytest.raises(PartitionError, match="2 stages as long as their memory allows .100 by.* end at layer 4 of 6"):
        cut_layers(layers, [StageSpec(memory=100)] * 2, (), of_one_stage([StageSpec(memory=100)] * 2))
    shared = [DeviceStages((0, 1), 200, ((HeldChunks(0), HeldChunks(0)),))]
    with pytest.raises(PartitionError, match="no balance fits: the stages of a device hold too much together, howev"):
        cut_layers(layers, [StageSpec(memory=200)] * 2, (), shared)
    with pytest.raises(PartitionError, match="cannot cut 6 layers into 7 stages"):
        cut_layers(layers, [StageSpec()] * 7)


@pytest.mark.parametrize("memory", [12, 9])  # 9: nothing fits
def test_windows_that_are_longer_than_memory_allows_are_not_looked_at(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, times = [], windows.Windows.times

    def noted(self: windows.Windows, caps: Any, width: int) -> Any:
        widths.append(width)
        return times(self, caps, width)

    monkeypatch.setattr(windows.Windows, "times", noted)
    layers = Layers([1.0] * 199 + [1000.0], *[amounts_of([Bytes(1)] * 200)] * 3, [0.0] * 201)
    specs = [StageSpec(memory=memory, kept=0)] * 20
    try:
        assert max(cut_layers(layers, specs, (), of_one_stage(specs))) <= memory
    except PartitionError as error:
        assert memory == 9 and "end at layer 180 of 200" in str(error)
    assert max(widths) <= 2 * 10  # layers per stage, of which any cut looks at twice as many


def test_chunks_in_flight_move_layers_to_later_stages() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    measured = profile(model, torch.rand(64, 32), device="meta")
    one = measured.stage(1, 2)
    room = 2 * one.state + 8 * one.saved + 1
    assert cut(measured, 2) == [4, 4]
    assert cut(measured, [StageSpec(memory=3 * one.state + 9 * one.saved, kept=3), StageSpec()]) == [3, 5]
    assert cut(measured, [StageSpec(memory=room, kept=4), StageSpec(kept=1)]) == [2, 6]
    slow = cut(measured, 2, latency=0, bandwidth=1.0)
    assert sum(slow) == 8


def test_stages_of_one_device_share_memory_where_lane_of_says_so() -> None:
    measured = profile(nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]), torch.rand(64, 32), device="meta")
    one = measured.stage(1, 2)
    small = StageSpec(memory=3 * (one.state + one.saved))
    specs = [small, StageSpec(), StageSpec(), small]
    assert cut(measured, specs) == [2, 2, 2, 2]
    shared = cut(measured, specs, lane_of=[0, 1, 2, 0])
    assert shared[0] + shared[3] <= 3 and max(shared) == 3
    specs[3] = StageSpec()
    with pytest.raises(PartitionError, match="stages .0, 3. share a device, but their specs say that it has"):
        cut(measured, specs, lane_of=[0, 1, 2, 0])
    with pytest.raises(PartitionError, match="lane_of has 2 numbers for 4 stages"):
        cut(measured, specs, lane_of=[0, 1])


def test_a_search_that_is_cut_short_says_so() -> None:
    sizes = [7, 7, 1, 5, 9, 8, 7]
    case = Layers([1] * 7, amounts_of([Bytes(size) for size in sizes]))
    lanes = [
        DeviceStages((0, 2), 22.5, ((HeldChunks(0), HeldChunks(0)),)),
        DeviceStages((1, 3), 22.5, ((HeldChunks(0), HeldChunks(0)),)),
    ]
    found = cut_layers(case, [StageSpec()] * 4, (), lanes)
    held = [sum(sizes[a:b]) for a, b in zip([0, *accumulate(found)], accumulate(found))]
    assert max(held[0] + held[2], held[1] + held[3]) <= 22.5
    with pytest.raises(PartitionError, match="no balance is known to fit: devices with several stages hold"):
        cut_layers(case, [StageSpec()] * 4, (), lanes, splits=1)


@pytest.mark.parametrize("wrong, words", [
    ({"speed": 0}, "speed is 0, but must be a finite number above 0"),
    ({"memory": float("nan")}, "memory is nan"), ({"memory": -1}, "memory is -1, but must be a number of bytes from 0"),
    ({"memory": "24GiB"}, "memory is '24GiB', but must be a number"),
    ({"kept": -1}, "kept is -1, but must be a finite number that is not negative"),
])  # fmt: skip
def test_stages_that_cannot_be_are_refused(wrong: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        StageSpec(**wrong)


def test_stages_are_a_number_or_specs() -> None:
    layers = profile(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.rand(8, 8), device="meta")
    assert cut(layers, np.int64(2)) == cut(layers, 2) == cut(layers, (StageSpec() for _ in range(2)))
    with pytest.raises(PartitionError, match=r"stages is \[1, 2\]. Give the number of stages, or a StageSpec for each"):
        cut(layers, [1, 2])
    with pytest.raises(PartitionError, match="stages must be a whole number, 1 or more; got 2.0"):
        cut(layers, 2.0)
    for latency, bandwidth, words in (
        (-1, 1, "latency is -1, but"), (float("nan"), 1, "latency is nan"), ("1", 1, "latency is '1'"),
        (0, 0, "bandwidth is 0, but must be a finite number above 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            cut(layers, 2, latency, bandwidth)
    assert cut(layers, 2, lane_of=iter([0, 1])) == cut(layers, 2)


def test_times_that_cannot_be_are_refused() -> None:
    for works in ([1.0, float("nan")], [1.0, inf], [1.0, -1.0]):
        with pytest.raises(PartitionError, match=r"work must be finite and not negative, but work.1. is"):
            cut_layers(Layers(works), [StageSpec()])
    with pytest.raises(PartitionError, match=r"messages must be finite and not negative, but messages.1. is nan"):
        cut_layers(Layers([1, 1]), [StageSpec()] * 2, [[0, float("nan"), 0]])
