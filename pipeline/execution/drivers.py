"""Drivers of a call's lanes: all in the calling thread, or those of each accelerator in a thread of their own.

    workers="inline"     the merged order of the plan, one thread             lanes that share a processor
    workers="threads"    threads.drive_threads, a thread a group of lanes     lanes with accelerators of their own

With workers=None lanes that share a place are one group, and there are threads where two places are accelerators. With
workers="threads" every lane is a group. Groups hold what they share one at a time: a place, or all places on an
accelerator, with its default generator; a layer that stands in two stages; and what belongs to the process, as long as
a stage draws from a default generator of the host, puts one back, or changes a switch of torch (common/touches.py), or
as forwards write into what modules of several stages hold. In a thread of autograd's own (a backward within a backward
on an accelerator) that thread drives all lanes.

Whether a stage draws is seen in calls that compare, which run in one thread; a call in which a stage begins to draw is
run once more (`DrewError` in call.py). So it is in one thread, for Python's and numpy's generators. `except_last`
counts on the inline order: lanes that share a place and have threads of their own, with workers="threads", may keep a
chunk more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from pipeline.common.accelerators import bind, current_streams, entered, entered_streams, is_accelerator
from pipeline.common.places import Place
from pipeline.common.torch_modes import Ambient
from pipeline.execution.plan import Phase
from pipeline.execution.threads import Perform, drive_threads
from scheduler import Action

WORKERS = (None, "inline", "threads")


def check_workers(workers: str | None) -> None:
    if workers not in WORKERS:
        raise ValueError(
            f"workers is {workers!r}. Use 'inline' (one thread), 'threads' (one for each lane), or None: threads where "
            "stages are on several accelerators."
        )


def uses_threads(workers: str | None, places: Sequence[Place]) -> bool:
    """Whether lanes run in threads of their own."""
    if workers is None:
        return len({place for place in places if place.is_accelerator}) > 1
    return workers == "threads"


def lane_groups(workers: str | None, places: Sequence[Place], lane_of: Sequence[int]) -> list[list[int]]:
    """The groups of lanes of which one computes at a time: those of one thread, or of one place."""
    if not uses_threads(workers, places):
        return [list(dict.fromkeys(lane_of))]
    return _groups(lane_of, places, separate=False)


class Driver:
    """Runs the phases of one call.

    Args:
        places: where each stage computes.
        layers: those of each stage.
        lane_of: the lane of each stage.
        workers: see above.

    Attributes:
        has_threads: whether several threads may compute at a time.
    """

    def __init__(
        self,
        places: Sequence[Place],
        layers: Sequence[Sequence[nn.Module]],
        lane_of: Sequence[int],
        workers: str | None,
    ) -> None:
        self._places = places
        self._lane_of = lane_of
        self._accelerators = {place.device for place in places if is_accelerator(place.device)}
        self._groups: list[list[int]] = []
        self._locks: list[list[threading.Lock]] = []
        self._generators = threading.Lock()  # of the default generators of the host
        if uses_threads(workers, places):
            self._groups = _groups(lane_of, places, separate=workers == "threads")
            self._locks = _locks(places, layers)
        self.has_threads = len(self._groups) > 1

    def run(self, phase: Phase, perform: Perform, draws: bool, ambient: Ambient, in_turns: bool) -> None:
        """Run a phase.

        Args:
            phase: what to run.
            perform: does the work of an action.
            draws: whether a stage may draw from a default generator of the host, or touch what else belongs to the
                process: then stages compute one at a time.
            ambient: torch's switches, as they are in this thread.
            in_turns: one thread drives all lanes, whatever `workers` is.
        """
        if phase.needs is None or in_turns or not self.has_threads or _is_foreign():
            on_device = self._on_device(perform)
            for action in phase.merged:
                on_device(action)
            return

        def locked(action: Action) -> None:
            locks = self._locks[action.stage]
            _holding([*locks, self._generators] if draws else locks, perform, action)

        orders = [
            [action for action in phase.merged if self._lane_of[action.stage] in group] for group in self._groups
        ]
        enter = _thread_like_this(ambient, self._places, len(orders) - 1)
        drive_threads(orders, phase.needs, self._on_device(locked), enter)

    def _on_device(self, perform: Perform) -> Perform:
        """Perform with the stage's accelerator as the current device, which a new thread does not begin with."""
        devices = self._accelerators
        if not devices or (
            not self.has_threads
            and {device.index for device in devices} == {torch.accelerator.current_device_index()}
        ):
            return perform

        def on_device(action: Action) -> None:
            with entered(self._places[action.stage].device):
                perform(action)

        return on_device


def _is_foreign() -> bool:
    """Whether Python did not start this thread: it may be one in which autograd works, for which lanes would wait."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _holding(locks: Sequence[threading.Lock], perform: Perform, action: Action) -> None:
    """Perform while holding locks. By `with` alone: an ExitStack that is interrupted as it enters a lock leaks it."""
    if not locks:
        perform(action)
        return
    with locks[0]:
        _holding(locks[1:], perform, action)


def _groups(lanes: Sequence[int], places: Sequence[Place], separate: bool) -> list[list[int]]:
    """Lanes that one thread drives; the last group is that of the last stage."""
    groups: dict[object, list[int]] = {}
    for stage, lane in enumerate(lanes):
        if not any(lane in group for group in groups.values()):
            groups.setdefault(lane if separate else places[stage], []).append(lane)
    lane_groups = list(groups.values())
    last = next(group for group in lane_groups if lanes[-1] in group)
    return [group for group in lane_groups if group is not last] + [last]


def _locks(places: Sequence[Place], layers: Sequence[Sequence[nn.Module]]) -> list[list[threading.Lock]]:
    """For each stage the locks that it holds while it computes, in one order for all stages."""
    shared_by = [place.device if place.is_accelerator else place for place in places]  # it has one generator
    place_locks = {place: threading.Lock() for place in shared_by}
    modules = [{id(module) for layer in stage for module in layer.modules()} for stage in layers]
    shared: dict[frozenset[int], threading.Lock] = {}  # by the stages that have a module in common
    for module in set().union(*modules):
        stages = frozenset(stage for stage, module_ids in enumerate(modules) if module in module_ids)
        if len(stages) > 1:
            shared.setdefault(stages, threading.Lock())
    ordered = sorted(shared, key=sorted)
    return [
        [place_locks[place], *(shared[stages] for stages in ordered if stage in stages)]
        for stage, place in enumerate(shared_by)
    ]


def _thread_like_this(
    ambient: Ambient, places: Sequence[Place], own_group: int
) -> Callable[[int], AbstractContextManager[object]]:
    """Give a group's thread the switches, grad mode, streams and device of this one. `own_group`: this thread's."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    streams = current_streams([place.device for place in places])
    device = torch.accelerator.current_device_index() if streams else -1

    @contextmanager
    def enter(number: int) -> Iterator[None]:
        with ExitStack() as stack:
            if number != own_group:
                stack.enter_context(torch.inference_mode(inference))
                stack.enter_context(torch.set_grad_enabled(grad))
                if streams:
                    stack.enter_context(entered_streams(*streams))
                    bind(streams)
                    torch.accelerator.set_device_index(device)  # a stream is current with its device
                if any([enabled for _, enabled, _ in ambient.autocast]):
                    torch.autocast_increment_nesting()  # as in the caller: autocast's cache is emptied by the last exit
                    stack.callback(torch.autocast_decrement_nesting)
                stack.enter_context(ambient.entered(whole_process=False))
            yield

    return enter
