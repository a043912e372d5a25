"""The plan of a call: the orders that it runs, and the chunks that it recomputes.

    schedule, chunks, devices --> one or two phases of orders, the merged order of each device, the recomputed pairs

`pipe(x)` runs all F, then (in backward) all the rest, whatever the schedule; `step` runs the order as it is;
`evaluate` runs its F half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.execution.engine import Needs, merged_order, needs_of
from pipeline.recompute.policy import POLICIES, Policy, recomputed
from scheduler import Action, Schedule


class Phase(NamedTuple):
    """Orders that are driven in one go, after the actions of `before`; by one thread, in the order `merged`.

    `needs` None: one order, whose every action waits for other ranks by itself.
    """

    orders: tuple[tuple[Action, ...], ...]
    merged: tuple[Action, ...]
    needs: Needs | None
    before: tuple[Action, ...]


class Plan(NamedTuple):
    """The phases of a call, and for each device the one order in which all its lanes run."""

    schedule: Schedule
    phases: tuple[Phase, ...]
    device_orders: tuple[tuple[Action, ...], ...]
    by_mode: dict[str, frozenset[tuple[int, int]]]  # the pairs that each named mode recomputes
    parts: tuple[tuple[tuple[Action, ...], ...], ...]  # for each phase the orders of all lanes, other ranks' too

    def recomputed(self, policy: Policy) -> frozenset[tuple[int, int]]:
        """The (stage, chunk) pairs that `policy` recomputes here."""
        return recomputed(policy, self.device_orders) if callable(policy) else self.by_mode[policy]


def plan_step(schedule: Schedule, devices: Sequence[object], rank: int | None = None) -> Plan:
    """A plan of one phase: the whole order."""
    return _plan(schedule, [schedule.orders], devices, rank)


def plan_forward(schedule: Schedule, devices: Sequence[object], rank: int | None = None) -> Plan:
    """A plan of two phases: all F, then the rest."""
    return _plan(schedule, [schedule.forward_half(), schedule.backward_half()], devices, rank)


def _plan(
    schedule: Schedule, parts: list[tuple[tuple[Action, ...], ...]], devices: Sequence[object], rank: int | None
) -> Plan:
    """The plan of all lanes, or of one rank's."""
    if rank is not None:
        own = [(orders[rank],) for orders in parts]
        device_orders: tuple[tuple[Action, ...], ...] = (tuple(action for (order,) in own for action in order),)
        by_mode = {mode: recomputed(mode, device_orders) for mode in POLICIES}
        phases_here = tuple([Phase((order,), order, None, ()) for (order,) in own])
        return Plan(schedule, phases_here, device_orders, by_mode, tuple(parts))
    phases: list[Phase] = []
    merged: tuple[Action, ...] = ()
    for orders in parts:
        needs = needs_of(orders, schedule.stages, schedule.split)
        phases.append(Phase(orders, merged_order(orders, needs, merged), needs, merged))
        merged += phases[-1].merged
    distinct = list(dict.fromkeys(devices))
    device_orders = tuple(tuple(action for action in merged if devices[action.stage] == device) for device in distinct)
    by_mode = {mode: recomputed(mode, device_orders) for mode in POLICIES}
    return Plan(schedule, tuple(phases), device_orders, by_mode, tuple(parts))
