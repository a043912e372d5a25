"""The order of unequal devices along the pipeline: which device runs the first lane of a schedule, which the next.

    schedule: lane 0, 1, 2 ──reordered by (2, 0, 1)──► the same orders and stages, on devices 2, 0, 1

Devices of one speed and memory are equal, unless there is a link for each pair: to exchange them changes nothing, so an
order is told by the kinds of devices in it. A device keeps its number, and so its links, its memory and its rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, repeat
from math import factorial, prod

from partition.plans.trials import Machine, Trial, TrialSetup, enumerated, polished, tried
from scheduler import Placement, Schedule

DeviceOrder = tuple[int, ...]


def tried_in_orders(setups: Sequence[TrialSetup], may_reorder: bool) -> tuple[list[Trial], list[DeviceOrder], bool]:
    """The trials of schedules on devices, in the orders that may be good.

    All orders that differ, where there are few enough for so many schedules. Else the given one, and those by memory
    and by speed; and for the best of all these, two devices exchanged at a time, for as long as that is better.

    Returns:
        All trials, the orders in which devices were taken, and whether no other order was left out that may be taken.
    """
    machine = setups[0].machine
    orders = _all_orders(machine, max(_TRIALS // len(setups), 1)) if may_reorder else [_given_order(machine)]
    is_all = bool(orders)
    orders = orders or _likely_orders(machine)
    candidates = [(trial, setup, order) for setup in setups for order in orders
                  for trial in tried(_placed(setup, order))]  # fmt: skip
    best, setup, order = min(candidates, key=lambda candidate: candidate[0].rank)
    trials = [trial for trial, _, _ in candidates]
    while not is_all:
        exchanged = [(trial, next_order) for next_order in _exchanges(order, machine)
                     for trial in tried(_placed(setup, next_order))]  # fmt: skip
        trials += [trial for trial, _ in exchanged]
        next_best, next_order = min(exchanged, key=lambda candidate: candidate[0].rank)
        if next_best.rank >= best.rank:
            break
        best, order = next_best, next_order
    return trials, list(dict.fromkeys([*orders, order])), is_all


def fitting_trial(best: Trial, setups: Sequence[TrialSetup], orders: Sequence[DeviceOrder]) -> tuple[Trial, bool]:
    """A trial that fits, where the best of those that were tried does not, and whether all there is was looked at.

    That is all balances and recomputations of the schedules, in these orders of the devices. Where none fits, or none
    is come upon, it is the best one.
    """
    budget = _BUDGET
    for setup in setups:
        for order in orders:
            trial, budget = enumerated(_placed(setup, order), budget)
            if trial is not None or budget < 0:
                return best if trial is None else polished(trial), False
    return best, True


def reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """A schedule with each lane on the device of an order.

    Example:
        >>> from scheduler import by_name
        >>> reordered(by_name("1f1b", 3, 4), (2, 0, 1)).placement
        Placement(lane_of=(2, 0, 1))
    """
    lane_at = sorted(range(len(order)), key=order.__getitem__)
    placement = Placement(tuple([order[lane] for lane in schedule.placement.lane_of]))
    cells = schedule.cells()
    return Schedule.of_cells(schedule.name, placement, schedule.chunks, [cells[lane] for lane in lane_at])


def _placed(setup: TrialSetup, order: DeviceOrder) -> TrialSetup:
    if order == _given_order(setup.machine):
        return setup
    schedule = reordered(setup.schedule, order)
    return setup._replace(pipe_schedule=schedule, schedule=schedule)


def _given_order(machine: Machine) -> DeviceOrder:
    return tuple(range(len(machine.speeds)))


def _all_orders(machine: Machine, most: int) -> list[DeviceOrder]:
    """All orders of the devices that differ, the given one first; none, where there are more than so many."""
    kinds = _kinds(machine)
    count = factorial(len(kinds)) // prod(map(factorial, Counter(kinds).values()))
    if count > most:
        return []
    given_order = _given_order(machine)
    return list(dict.fromkeys([given_order, *_distinct(list(given_order), kinds)]))


def _likely_orders(machine: Machine) -> list[DeviceOrder]:
    given_order = _given_order(machine)
    keys = [machine.caps, machine.speeds]
    by_key = [tuple(sorted(given_order, key=key.__getitem__, reverse=down)) for key in keys for down in (True, False)]
    return list(dict.fromkeys([given_order, *by_key]))


def _exchanges(order: DeviceOrder, machine: Machine) -> Iterator[DeviceOrder]:
    """The orders with two unequal devices in each other's place."""
    kinds = _kinds(machine)
    for first, second in combinations(range(len(order)), 2):
        if kinds[order[first]] != kinds[order[second]]:
            changed = list(order)
            changed[first], changed[second] = order[second], order[first]
            yield tuple(changed)


def _kinds(machine: Machine) -> list[tuple[float, ...]]:
    """The kind of each device; with links by pairs no two are of one."""
    numbers = range(len(machine.speeds)) if isinstance(machine.link, Mapping) else repeat(0)
    return list(zip(machine.speeds, machine.caps, numbers))


def _distinct(devices: list[int], kinds: Sequence[tuple[float, ...]]) -> Iterator[DeviceOrder]:
    """The orders of some devices of which no two have the same kinds, equal devices by number."""
    if not devices:
        yield ()
    for first in {kinds[device]: device for device in reversed(devices)}.values():
        for rest in _distinct([device for device in devices if device != first], kinds):
            yield first, *rest


_TRIALS = 240  # schedules in orders: then it takes some seconds
_BUDGET = 3000  # balances to look at before no plan is said to fit
