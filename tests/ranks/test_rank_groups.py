"""A Pipe runs on the ranks that it is told to, and on no others."""

from __future__ import annotations

import re

import pytest
import torch
from cover import either
from crew import Crew
from one_and_many import agree_all, agree_on
from rank_transparency import LOOPS, TWO_A_LANE

from scheduler import names


@pytest.mark.parametrize("agent", [True, False])
def test_a_pipe_initialises_torch_distributed_where_the_script_has_not(crew2: Crew, agent: bool) -> None:
    found = crew2.run("rank_groups:initialised_by_the_pipe", init=False, agent=agent)
    assert found == [(False, "gloo", [])] * 2


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0, 1], [2]]])
def test_pipes_of_several_groups_train_side_by_side(crew4: Crew, members: list[list[int]]) -> None:
    found = crew4.run("rank_groups:side_by_side", members)
    assert found == [(mine, []) for rank in range(4) for mine, ranks in enumerate(members) if rank in ranks]


def test_ranks_build_a_pipe_together_after_one_of_them_was_refused_its_own(crew2: Crew) -> None:
    (told, differing), *others = crew2.run("rank_groups:refused_on_one")
    assert told.startswith("batch_dim is -1") and differing == []
    assert others == [("", [])]


def test_replicas_of_a_pipe_average_their_gradients(crew4: Crew) -> None:
    for ours, theirs in crew4.run("rank_groups:averaged"):
        assert len(ours) > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_a_rank_outside_the_group_is_told_so(crew3: Crew) -> None:
    first, second, third = crew3.run("rank_groups:outside")
    assert first == second == "" and "group has no place for rank 2" in third


def test_a_group_of_one_and_devices_run_in_this_process_alone(crew3: Crew) -> None:
    for by_group, by_devices in crew3.run("rank_groups:alone"):
        assert by_group == by_devices and len(by_group) == 10


def test_pipes_run_after_torch_distributed_was_shut_down_and_initialised(crew2: Crew, crew3: Crew) -> None:
    for crew in (crew2, crew3):
        first, *others = crew.run("rank_groups:again")
        assert first == [first[0]] * 3 and others == [first] * (crew.size - 1)


def test_many_chunks_and_large_ones_pass_under_every_schedule(crew2: Crew, crew4: Crew) -> None:
    """More messages than any window holds; messages of half a megabyte."""
    agree_on((crew2, crew4), "rank_groups:many_chunks", lambda size: [
        ((2 if name in (*LOOPS, *TWO_A_LANE) else 1) * size, name, 40, 1, 4)
        for name in either(names()[::2], names())
    ])  # fmt: skip
    agree_all(crew2, "rank_groups:many_chunks", [(2, "1f1b", 4, 128, 512), (4, "zb-v", 4, 128, 512)])


@pytest.mark.parametrize(("names", "hosts", "shared"), [
    (["GPU-a", "GPU-b", "GPU-a"], "xxx", r"ranks \[0, 2\] all take device GPU-a on host x\."),
    (["xpu:0"] * 3, "xyx", r"ranks \[0, 2\] all take device xpu:0 on host x\."),
    (["GPU-a", "GPU-b", "GPU-c"], "xxx", ""),
    (["xpu:0"] * 3, "xyz", ""),
    (["", "", ""], "xxx", ""),  # on the host, or unknown
])
def test_ranks_of_a_host_that_take_the_same_device_are_told_so(
    crew3: Crew, names: list[str], hosts: str, shared: str
) -> None:
    """All ranks raise it, and build another Pipe afterwards."""
    said = crew3.run("rank_groups:on_devices", names, list(hosts))
    assert said == [said[0]] * 3 and bool(said[0]) == bool(shared)
    assert re.match(shared, said[0])


def test_a_group_for_the_cpu_alone_and_one_bound_to_a_device_run_there(crew2: Crew) -> None:
    assert crew2.run("rank_groups:device_with_backend", "gloo") == ["xpu:3"] * 2
    assert crew2.run("rank_groups:device_with_backend", "cpu:gloo") == ["cpu"] * 2
    assert crew2.run("rank_groups:device_that_is_bound") == ["xpu:1"] * 2
