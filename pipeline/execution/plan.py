"""The plan of a call: the orders that it runs, and the chunks that it recomputes.

    schedule, chunks, devices --> one or two phases of orders, the merged order of each device, the recomputed pairs
    over ranks                --> the phases of one rank, each with its messages (p2p_plan.py)

`pipe(x)` runs all F, then (in backward) all the rest, whatever the schedule; `step` runs the order as it is;
`evaluate` runs its F half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.data.values import Values
from pipeline.execution.engine import Needs, merged_order, needs_of
from pipeline.execution.p2p_plan import P2PPlan
from pipeline.recompute.policy import POLICIES, Policy, recomputed
from scheduler import Action, Schedule


class Phase(NamedTuple):
    """Actions that are driven in one go; by one thread, in the order `merged`.

    `needs`: what each waits for in this phase; None: each waits for other ranks by itself. `messages`: to and from
    these; None: in one process.
    """

    merged: tuple[Action, ...]
    needs: Needs | None
    messages: P2PPlan | None = None


class CallPlan(NamedTuple):
    """The phases of a call, and for each device the one order in which all its lanes run."""

    schedule: Schedule
    phases: tuple[Phase, ...]
    device_orders: tuple[tuple[Action, ...], ...]
    by_mode: dict[str, frozenset[tuple[int, int]]]  # the pairs that each named mode recomputes

    def recomputed(self, policy: Policy) -> frozenset[tuple[int, int]]:
        """The (stage, chunk) pairs that `policy` recomputes here."""
        return recomputed(policy, self.device_orders) if callable(policy) else self.by_mode[policy]


class OneRank(NamedTuple):
    """The rank that a plan is for, and the table of values that cross stages."""

    rank: int
    values: Values


def plan_step(schedule: Schedule, devices: Sequence[object], one_rank: OneRank | None = None) -> CallPlan:
    """A plan of one phase: the whole order. `one_rank` None: one process runs all lanes."""
    return _plan(schedule, [schedule.orders], devices, one_rank)


def plan_forward(schedule: Schedule, devices: Sequence[object], one_rank: OneRank | None = None) -> CallPlan:
    """A plan of two phases: all F, then the rest."""
    return _plan(schedule, [schedule.forward_half(), schedule.backward_half()], devices, one_rank)


def _plan(
    schedule: Schedule, parts: list[tuple[tuple[Action, ...], ...]], devices: Sequence[object], one_rank: OneRank | None
) -> CallPlan:
    """The plan of all lanes, or of one rank's."""
    phases: list[Phase] = []
    merged: tuple[Action, ...] = ()
    if one_rank is not None:
        rank, values = one_rank
        for orders in parts:
            p2p_plan = P2PPlan(orders, values, schedule.placement, rank)
            phases.append(Phase(orders[rank], None, p2p_plan))
            merged += orders[rank]
        device_orders = [merged]
    else:
        for orders in parts:
            needs = needs_of(orders, schedule.stages, schedule.split, frozenset(merged))
            phases.append(Phase(merged_order(orders, needs), needs))
            merged += phases[-1].merged
        distinct = dict.fromkeys(devices)
        device_orders = [tuple(action for action in merged if devices[action.stage] == device) for device in distinct]
    by_mode = {mode: recomputed(mode, device_orders) for mode in POLICIES}
    return CallPlan(schedule, tuple(phases), tuple(device_orders), by_mode)
