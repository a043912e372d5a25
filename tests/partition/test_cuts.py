"""Laws of cuts: as good as the best of all balances, under memory caps, messages, unequal devices and sharing."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf, isclose
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_profiles import models
from torch import nn

from partition import PartitionError, StageSpec, balance_costs, cut, profile
from partition.cuts.cutting import Layers, cut_layers, layers_of, slowest
from partition.cuts.windows import amounts_of
from partition.profiles.amounts import Bytes, joined


def balances(layers: int, stages: int) -> Iterator[list[int]]:
    """All of them."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in zip((0, *cuts), (*cuts, layers))]


def walked(case: Any, balance: Sequence[int]) -> float:
    """The time of the slowest stage, stage by stage and layer by layer; inf where one does not fit."""
    works, states, saved, entry, specs, messages, forward = case
    start, most = 0, 0.0
    for stage, (size, spec) in enumerate(zip(balance, specs)):
        stop = start + size
        time = (sum(works[start:stop]) + spec.recompute * sum(forward[start:stop]) + spec.work) / spec.speed
        time += messages[stage - 1][start] if stage else 0
        time += messages[stage][stop] if stage + 1 < len(specs) else 0
        held = joined(states[start:stop]) + spec.kept * joined(saved[start:stop]) + spec.inputs * entry[start]
        most = max(most, time if held + spec.state <= spec.memory else inf)
        start = stop
    return most


sizes = st.integers(0, 20)
amounts = st.builds(Bytes, sizes, st.dictionaries(st.integers(0, 3), st.just(8), max_size=2).map(
    lambda shared: tuple(shared.items())))  # fmt: skip


@st.composite
def cases(draw: Any) -> Any:
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(layers, 4)))
    of_layers = {"min_size": layers, "max_size": layers}
    specs = draw(st.lists(st.builds(
        StageSpec, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([inf, 60.0, 120.0, 250.0]), st.integers(1, 4),
        st.integers(0, 2), st.integers(0, 5).map(float), st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]),
    ), min_size=stages, max_size=stages))  # fmt: skip
    times = st.lists(st.integers(0, 6), min_size=layers + 1, max_size=layers + 1)
    return (
        draw(st.lists(sizes, **of_layers)), draw(st.lists(amounts, **of_layers)), draw(st.lists(amounts, **of_layers)),
        draw(st.lists(sizes, **of_layers)), specs, draw(st.lists(times, min_size=stages - 1, max_size=stages - 1)),
        draw(st.lists(sizes, **of_layers)),
    )  # fmt: skip


@given(cases())
def test_no_balance_that_fits_has_a_faster_slowest_stage(case: Any) -> None:
    works, states, saved, entry, specs, messages, forward = case
    layers = Layers(works, amounts_of(states), amounts_of(saved), entry=entry, forward=forward)
    best = min(walked(case, balance) for balance in balances(len(works), len(specs)))
    if best == inf:
        with pytest.raises(PartitionError, match="no balance fits"):
            cut_layers(layers, specs, messages)
    else:
        found = cut_layers(layers, specs, messages)
        assert len(found) == len(specs) and sum(found) == len(works) and min(found) >= 1
        assert isclose(walked(case, found), best) and isclose(slowest(layers, specs, messages, found), best)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 12))
def test_on_equal_devices_the_slowest_stage_is_that_of_exact_arithmetic(works: list[float], stages: int) -> None:
    stages = min(stages, len(works))
    layers, specs = Layers(works), [StageSpec()] * stages
    exact = slowest(layers, specs, (), balance_costs(works, stages))
    assert isclose(slowest(layers, specs, (), cut_layers(layers, specs)), exact, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize("name", models())
def test_layers_of_a_profile_add_up_as_its_stages_do(name: str) -> None:
    model, x = models()[name]
    measured = profile(model, x, device="meta", optimizer=2)
    layers = layers_of(measured)
    for start in range(len(model)):
        for stop in range(start + 1, len(model) + 1):
            stage = measured.stage(start, stop)
            for amounts_, size in ((layers.state, stage.state), (layers.saved, stage.saved)):
                twice = sum(size for before, later, size in amounts_.again if start <= before and later < stop)
                assert sum(amounts_.each[start:stop]) - twice == size
            again = sum(size for before, later, size in layers.read.again if start <= before and later < stop)
            assert sum(layers.read.each[start:stop]) - again + layers.entry[start] == stage.read


def test_what_does_not_fit_is_said_of_a_stage_and_a_layer() -> None:
    layers = Layers([1, 1, 1], amounts_of([Bytes(4), Bytes(90), Bytes(4)]), amounts_of([Bytes(0)] * 3))
    with pytest.raises(PartitionError, match="no balance fits: stage 1 cannot hold layer 1 alone in 50 bytes. Recompu"):
        cut_layers(layers, [StageSpec(memory=50)] * 2)
    layers = Layers([1] * 6, amounts_of([Bytes(40)] * 6), amounts_of([Bytes(0)] * 6))
    with pytest.raises(PartitionError, match="2 stages as long as their memory allows .100 by.* end at layer 4 of 6"):
        cut_layers(layers, [StageSpec(memory=100)] * 2)
    with pytest.raises(PartitionError, match="cannot cut 6 layers into 7 stages"):
        cut_layers(layers, [StageSpec()] * 7)


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
