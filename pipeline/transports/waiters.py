"""The threads that wait in a caller's stead, so that it can be woken from a wait that cannot be ended.

    wait(job)    caller <--answer-- thread that runs the job        or        caller <--answer-- wake(), from any thread

A thread whose job has ended takes the next one. One whose wait was given up is left alone until its job ends by itself,
and holds nothing but that job. The way there and back takes 15 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

WaitJob: TypeAlias = Callable[[], object]
AnswerQueue: TypeAlias = "SimpleQueue[BaseException | bool]"  # what the job raised, or whether it ended


class Waiters:
    """Threads for jobs that wait: as many as wait at a time.

    Example:
        >>> waiters = Waiters()
        >>> waiters.wait(lambda: None)
        True
        >>> waiters.wake()
        >>> waiters.wait(lambda: None)
        False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[tuple[WaitJob, AnswerQueue] | None]] = []
        self._waiting: set[AnswerQueue] = set()
        self._is_woken = False

    def wait(self, job: WaitJob) -> bool:
        """Whether a job has ended, which runs in one of the threads. False: `wake` was called before.

        Raises:
            Exception: the job's.
        """
        answers: AnswerQueue = SimpleQueue()
        with self._lock:
            if self._is_woken:
                return False
            self._waiting.add(answers)
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = SimpleQueue()
            threading.Thread(target=self._run, args=(jobs,), name="pipe waiter", daemon=True).start()
        jobs.put((job, answers))
        del job  # whoever keeps an error keeps what the variables here hold
        try:
            answer = answers.get()
        finally:
            with self._lock:
                self._waiting.discard(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wake(self) -> None:
        """End all waits, for ever, and each thread when its job has ended. From any thread."""
        with self._lock:
            self._is_woken = True
            for answers in self._waiting:
                answers.put(False)
            for jobs in self._idle:
                jobs.put(None)
            self._idle.clear()

    def _run(self, jobs: SimpleQueue[tuple[WaitJob, AnswerQueue] | None]) -> None:
        while (task := jobs.get()) is not None:
            job, answers = task
            answer = _outcome(job)
            del task, job
            with self._lock:
                is_over = self._is_woken
                if not is_over:
                    self._idle.append(jobs)
            answers.put(answer)
            del answers, answer
            if is_over:
                return


def _outcome(job: WaitJob) -> BaseException | bool:
    try:
        job()
    except BaseException as error:
        return error.with_traceback(None)  # which would keep the job
    return True
