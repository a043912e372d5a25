"""The most memory that some work asks for at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of the host that were in use at a time, of those that torch asked for within."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)
