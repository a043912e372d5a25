"""The nursery's children end as scripts do, tell where they are, and never outlive the process that began them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Nursery

HERE = str(Path(__file__).parent)
SCRIPT = """
import atexit, os, sys, time
from nursery import serve

def asleep():
    time.sleep(600)

def main(order, *fds):
    print("got", order, flush=True)
    atexit.register(print, "farewell")
    for fd in fds:
        os.write(fd, b"here")
    if order == "sleep":
        asleep()
    if order == "fail":
        sys.exit(3)

serve(main)
"""


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = Nursery(tmp_path / "script.py", {"PYTHONPATH": HERE})
    yield found
    found.stop()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_children_end_as_scripts_with_an_exit_code_and_what_they_wrote(nursery: Nursery, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    children = [nursery.fork(tmp_path / order, order, writer) for order in ("work", "fail")]
    os.close(writer)
    assert all(child.wait(30) for child in children)
    assert [child.state() for child in children] == ["exited with 0", "exited with 3"]
    assert [child.output() for child in children] == ["got work\nfarewell\n", "got fail\nfarewell\n"]
    assert all(child.ended is not None and child.ended <= time.monotonic() for child in children)
    assert os.read(reader, 100) == b"herehere"
    assert os.read(reader, 100) == b""  # nobody else holds the other end
    os.close(reader)


def test_a_child_that_hangs_tells_where_and_one_that_is_stopped_or_killed_is_seen(
    nursery: Nursery, tmp_path: Path
) -> None:
    child = nursery.fork(tmp_path / "child", "sleep")
    until = time.monotonic() + 30
    while not child.output() and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.wait(0.01) and child.state() == "running"
    assert "in asleep" in child.stacks()
    child.signal(signal.SIGSTOP)
    while child.state() != "stopped" and time.monotonic() < until:
        time.sleep(0.01)
    assert child.state() == "stopped"
    child.kill()
    assert child.state() == "killed by SIGKILL" and not is_alive(child.pid)


def test_stop_leaves_no_process(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.fork(tmp_path / "child", "sleep")
    nursery.stop()
    assert not is_alive(child.pid)


def test_children_end_with_the_process_that_began_their_nursery_however_that_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    code = (
        "import os, pathlib, nursery; folder = pathlib.Path(os.environ['FOLDER']);"
        "child = nursery.Nursery(folder / 'script.py').fork(folder / 'child', 'sleep');"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": HERE, "FOLDER": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert ran.returncode == -signal.SIGKILL
    pid = int(ran.stdout)
    until = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(pid)
