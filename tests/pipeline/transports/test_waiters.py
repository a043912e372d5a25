"""Threads that wait in a caller's stead."""

import threading
import time

import pytest

from pipeline.transports.waiters import Waiters


@pytest.fixture
def waiters():
    waiters = Waiters()
    yield waiters
    waiters.wake()


@pytest.fixture
def running():
    """The waiters' threads that this test has started: channels of other tests may still have theirs."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in set(threading.enumerate()) - before if thread.name == "pipe waiter"]


def soon(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_wait_ends_with_its_job_and_raises_what_that_raised(waiters, running):
    done = []
    for number in range(50):
        assert waiters.wait(lambda number=number: done.append((number, threading.current_thread().name)))
        with pytest.raises(ZeroDivisionError, match=f"number {number}"):
            waiters.wait(lambda number=number: raise_(ZeroDivisionError(f"number {number}")))
    assert done == [(number, "pipe waiter") for number in range(50)] and len(running()) == 1


def raise_(error):
    raise error


def test_waits_at_a_time_have_a_thread_each(waiters, running):
    go, found = threading.Event(), []
    callers = [threading.Thread(target=lambda: found.append(waiters.wait(go.wait))) for _ in range(5)]
    for caller in callers:
        caller.start()
    soon(lambda: len(running()) == 5)
    assert not found
    go.set()
    for caller in callers:
        caller.join(10)
    assert found == [True] * 5


def test_wake_ends_waits_whose_jobs_go_on_and_their_threads_end_with_those(running):
    waiters, go, found = Waiters(), threading.Event(), []
    callers = [threading.Thread(target=lambda: found.append(waiters.wait(go.wait))) for _ in range(3)]
    for caller in callers:
        caller.start()
    soon(lambda: len(running()) == 3)
    waiters.wake()
    waiters.wake()
    for caller in callers:
        caller.join(10)
    assert found == [False] * 3 and len(running()) == 3
    assert not waiters.wait(raise_)  # which is not run
    go.set()
    soon(lambda: not running())


def test_threads_that_have_nothing_to_wait_for_end_when_woken(running):
    waiters = Waiters()
    assert waiters.wait(int) and len(running()) == 1
    waiters.wake()
    soon(lambda: not running())
