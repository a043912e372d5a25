"""The stages of one call in this process, made for it alone."""

from __future__ import annotations

import threading
from contextvars import copy_context

from pipeline.execution.execution import Execution
from pipeline.recompute.randomness import Seeder
from pipeline.stage.stage import StageRun, StageSettings


def stages_of(execution: Execution, ends_in_loss: bool) -> list[StageRun]:
    """The stages in this process, made for one call."""
    setup = execution.setup
    settings = StageSettings(
        grad=setup.grad, ambient=execution.ambient, context=copy_context(), traits=setup.traits,
        compares=setup.compares, defer=setup.defer, external=threading.Lock(), owners={}, keep=setup.keep,
        overlap=execution.has_threads,
    )
    split: dict[int, set[int]] = {index: set() for index in execution.layers}
    for index, chunk in setup.plan.schedule.split:
        if index in split:
            split[index].add(chunk)
    return [
        StageRun(
            layers,
            Seeder(setup.seed, [setup.layout.places[index].device], execution.generators),
            execution.bring(index), settings, split[index], ends_in_loss and index == execution.last,
        )
        for index, layers in execution.layers.items()
    ]
