"""Does the harness tell the truth: results in order, exceptions whole, hangs and deaths named, and no process left?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from crew import PATH, Crew, CrewFailed, Lost, Raised, Returned
from under_torchrun import descendants, torchrun


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """One of the tests' own, with less patience."""
    crew = Crew(2, grace=1.0)
    yield crew
    crew.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_order_of_ranks(crew2: Crew, crew3: Crew, crew4: Crew) -> None:
    for crew in (crew2, crew3, crew4):
        value = {"a": torch.arange(3), "b": (None, "words")}
        results = crew.run("crew_jobs:identity", value)
        assert [rank for rank, _ in results] == list(range(crew.size))
        assert all(torch.equal(found["a"], value["a"]) and found["b"] == value["b"] for _, found in results)


def test_ranks_form_one_group_in_each_job(crew: Crew) -> None:
    assert [crew.run("crew_jobs:summed") for _ in range(3)] == [[[3.0], [3.0]]] * 3
    assert crew.run("crew_jobs:initialised_here", init=False) == [[3.0], [3.0]]
    assert crew.run("crew_jobs:initialised_here", init=False, agent=False) == [[3.0], [3.0]]
    assert crew.run("crew_jobs:summed") == [[3.0], [3.0]]


def test_a_rank_finds_what_torchrun_would_set_and_nothing_of_an_earlier_job(crew: Crew) -> None:
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE"
    found = crew.run("crew_jobs:environment", *names, environment={"MINE": "yes"})
    assert found == [[str(rank), str(rank), "2", "127.0.0.1", "1", "yes"] for rank in range(2)]
    assert crew.run("crew_jobs:environment", "MINE") == [[None], [None]]


def test_processes_are_kept_have_one_thread_and_seeds_of_their_own(crew: Crew) -> None:
    first, second = crew.run("crew_jobs:process", init=False), crew.run("crew_jobs:process")
    assert [each[0] for each in first] == [each[0] for each in second] == crew.pids()
    assert [each[1] for each in first] == [1, 1]
    assert [each[2] for each in first + second] == [False, False, True, True]
    assert first[0][3] != first[1][3]


def test_an_exception_comes_back_with_type_words_notes_stack_and_rank(crew: Crew) -> None:
    fine, raised = crew.outcomes("crew_jobs:raise_on", 1)
    assert fine == Returned(0, "fine")
    assert isinstance(raised, Raised) and raised.rank == 1 and raised.types[0] == "ValueError"
    assert raised.isa(ValueError) and raised.isa(Exception) and not raised.isa(KeyError)
    assert (raised.message, raised.notes) == ("rank 1 was asked to", ("a note",))
    assert "crew_jobs.py" in raised.traceback and "in raise_on" in raised.traceback and raised.seconds < 10
    with pytest.raises(CrewFailed, match="(?s)rank 0 returned\nrank 1 raised ValueError: rank 1 was .*in raise_on"):
        crew.run("crew_jobs:raise_on", 1)
    assert crew.run("crew_jobs:raise_on", -1) == ["fine", "fine"]


@pytest.mark.parametrize("job", ["wait_on", "spin_on"])
def test_a_hang_ends_with_the_stacks_of_who_hangs_and_the_next_job_works(crew: Crew, job: str) -> None:
    begun = time.monotonic()
    with pytest.raises(CrewFailed) as caught:
        crew.run(f"crew_jobs:{job}", 0, timeout=2.5)
    assert time.monotonic() - begun < 20
    words = str(caught.value)
    assert f"job crew_jobs:{job} on 2 ranks failed\nrank 0 gave no answer: running\nrank 1 returned\n" in words
    assert f"in {job}" in words.partition("rank 0, its stacks")[2]
    assert crew.run("crew_jobs:summed") == [[3.0], [3.0]]


def test_when_a_rank_raises_the_others_have_only_the_grace_left(crew: Crew) -> None:
    begun = time.monotonic()
    with pytest.raises(CrewFailed, match="(?s)rank 0 gave no answer: running\nrank 1 raised ZeroDiv.*in sleep"):
        crew.run("crew_jobs:raise_while_others_sleep", 1)
    assert time.monotonic() - begun < 20


def test_a_dead_rank_is_named_with_its_signal_and_the_next_job_works(crew: Crew) -> None:
    with pytest.raises(CrewFailed, match="rank 0 gave no answer: running\nrank 1 gave no answer: killed by SIGKILL"):
        crew.run("crew_jobs:kill_and_wait", 1)
    assert crew.run("crew_jobs:summed") == [[3.0], [3.0]]


def test_a_rank_may_be_lost_where_a_job_says_so(crew: Crew) -> None:
    for number, state in (signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "stopped"):
        first, second = crew.outcomes("crew_jobs:signal_on", 0, number, lost=[0])
        assert isinstance(first, Lost) and (first.rank, first.state) == (0, state)
        assert second == Returned(1, "fine")


def test_a_stopped_rank_is_named_and_none_is_left(crew: Crew) -> None:
    crew.run("crew_jobs:summed")
    pids = crew.pids()
    with pytest.raises(CrewFailed, match="rank 0 returned\nrank 1 gave no answer: stopped"):
        crew.run("crew_jobs:signal_on", 1, signal.SIGSTOP, timeout=2.0)
    assert not any(map(alive, pids))


def test_warnings_are_errors_and_so_is_what_cannot_be_sent(crew: Crew) -> None:
    assert all(isinstance(each, Raised) and each.isa(UserWarning) for each in crew.outcomes("crew_jobs:warn"))
    unsent = crew.outcomes("crew_jobs:unpicklable")
    assert all(isinstance(outcome, Raised) and "local object" in outcome.message for outcome in unsent)


def test_what_nobody_can_catch_fails_the_job(crew: Crew) -> None:
    with pytest.raises(CrewFailed, match="(?s)nobody could catch.*in thread short-lived.*ZeroDivisionError"):
        crew.run("crew_jobs:raise_in_thread")
    with pytest.raises(CrewFailed, match="(?s)nobody could catch.*from a destructor"):
        crew.run("crew_jobs:raise_in_destructor")


def test_a_thread_that_is_left_behind_does_not_reach_the_next_job(crew: Crew) -> None:
    before = crew.run("crew_jobs:leave_a_thread")
    after = [each[0] for each in crew.run("crew_jobs:process")]
    assert not set(before) & set(after) and not any(map(alive, before))


def test_what_a_rank_wrote_is_told(crew: Crew) -> None:
    words = r"(?s)KeyError: 'missing'.*rank 0 wrote\n(\[W[^\n]*\n)*some words of this rank"  # after warnings of torch
    with pytest.raises(CrewFailed, match=words):
        crew.run("crew_jobs:print_and_raise")


@pytest.mark.soak
def test_processes_end_with_the_process_that_began_them_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import os, signal, crew; c = crew.Crew(2); c.run('crew_jobs:summed'); print(*c.pids(), flush=True);"
        "c._ranks[0].send(b'never a job'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    pids = [int(pid) for pid in ran.stdout.split()]
    assert ran.returncode == -signal.SIGKILL and len(pids) == 2
    until = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids))


SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], os.environ["OMP_NUM_THREADS"])
def asleep():
    time.sleep(600)
if "sleep" in sys.argv:
    asleep()
"""


@pytest.mark.soak
def test_torchrun_runs_a_script_and_a_run_that_hangs_ends_with_stacks_and_no_process_left(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = torchrun(script, ["--some", "word"], nproc=2)
    assert ran.code == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [f"rank {rank} of 2 ['--some', 'word'] 1" for rank in range(2)]
    before = set(descendants(os.getpid()))
    ran = torchrun(script, ["sleep"], nproc=2, timeout=10.0)
    assert ran.code is None and ran.stderr.count("Fatal Python error: Aborted") == 2
    assert not set(descendants(os.getpid())) - before
