"""A plan: how to cut, schedule and recompute a model, and what that is expected to take and hold.

    plan(module, sample, devices=..., memory=...) ──► Plan ──► print, JSON
                                                       └─────► Pipe.from_plan(module, plan)
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from textwrap import wrap
from typing import Any, NamedTuple

from partition.errors import PartitionError
from partition.plans.memory import DevicePeak
from partition.profiles.amounts import spelt_bytes, spelt_work
from partition.profiles.profile import WorkUnit
from partition.reading import typed, typed_fields
from scheduler import Costs, Link, Schedule
from scheduler.aligning import aligned
from scheduler.notebook import NotebookResult


@dataclass(frozen=True)
class RecomputedStages:
    """A checkpoint policy for `Pipe`: some stages recompute every chunk, the others none.

    Example:
        >>> policy = RecomputedStages((0, 2))
        >>> [policy(stage, chunk=5) for stage in range(3)]
        [True, False, True]
    """

    stages: tuple[int, ...]

    def __call__(self, stage: int, chunk: int) -> bool:
        return stage in self.stages


class ExpectedStep(NamedTuple):
    """The time and memory of a step, as simulated.

    Attributes:
        step: from the first F to the last B, without the optimizer.
        bubble: the share of all devices' time in which they are idle.
        bound: no order of the same stages' actions takes less.
        unit: of these: "s", or "FLOP" where nothing was run and no rate was given.
        busy: of each device.
        peaks: bytes of each device.
    """

    step: float
    bubble: float
    bound: float
    unit: WorkUnit
    busy: tuple[float, ...]
    peaks: tuple[DevicePeak, ...]


@dataclass(frozen=True, repr=False)
class Plan(NotebookResult):
    """A way to cut, schedule and recompute a model.

    Attributes:
        balance: layers of each stage.
        chunks: of a mini-batch.
        schedule: its name, or a Schedule that was searched for, or has options.
        lane_of: the device of each stage, by its number.
        checkpoint: what `Pipe` takes: "never", "except_last", or some stages.
        rows: of the mini-batch.
        devices: their names; empty: as many ranks, or whatever devices `Pipe` finds.
        memory: bytes that each device may hold; empty: any amount.
        expected: what a step takes and holds.
        costs: what actions take and chunks hold: `pipe.report(steps, plan)` compares. A stage that recomputes some
            chunks has a share of a recomputation for each.
        notes: sentences: the runner-up and why it lost, what is faster but does not fit, what could not be tried.
        batch_dim: the dim that counts the rows of the mini-batch.
    """

    balance: tuple[int, ...]
    chunks: int
    schedule: str | Schedule
    lane_of: tuple[int, ...]
    checkpoint: str | RecomputedStages
    rows: int
    devices: tuple[str, ...]
    memory: tuple[float, ...]
    expected: ExpectedStep
    costs: Costs
    notes: tuple[str, ...] = ()
    batch_dim: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the devices, in the order in which the layers come to them first."""
        return tuple(dict.fromkeys(self.lane_of))

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `Pipe`, beside the module."""
        settings: dict[str, Any] = {
            "balance": list(self.balance), "chunks": self.chunks, "schedule": self.schedule,
            "batch_dim": self.batch_dim,
        }  # fmt: skip
        if self.devices:
            settings["devices"] = [self.devices[lane] for lane in self.lane_of]
        return {**settings, "checkpoint": self.checkpoint}

    def settings_with(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """The same with other ones in their place; of these, `devices` are listed by their numbers in the plan.

        Raises:
            ValueError: `devices` are not as many as the plan's.
        """
        settings = {**self.settings, **others}
        if others.get("devices") is not None:
            devices = list(others["devices"])
            if len(devices) != len(self.order):
                raise ValueError(
                    f"the plan is for {len(self.order)} devices, but devices lists {len(devices)}. List one for each, "
                    "in the order of their numbers in the plan; all stages of a device go to it."
                )
            settings["devices"] = [devices[lane] for lane in self.lane_of]
        return settings

    def to_json(self) -> str:
        """The plan as text, for `from_json`."""
        fields = dict(vars(self))
        fields["costs"] = {name: value for name, value in vars(self.costs).items() if value is not None}
        if isinstance(self.costs.link, Mapping):  # by pairs of lanes, which are no keys in JSON
            fields["costs"]["link"] = {"lanes": [[*lanes, link] for lanes, link in self.costs.link.items()]}
        fields["expected"] = {**self.expected._asdict(), "peaks": [peak._asdict() for peak in self.expected.peaks]}
        fields["memory"] = [limit if limit < inf else None for limit in self.memory]
        return json.dumps(fields, indent=1, default=_plain, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` has written.

        Raises:
            PartitionError: the text is something else.
        """
        try:
            fields = json.loads(text)
            schedule, checkpoint, costs = [fields.pop(name) for name in ("schedule", "checkpoint", "costs")]
            is_named = not isinstance(schedule, Mapping)
            memory = typed(tuple[float | None, ...], fields.pop("memory"), "memory")
            plan = cls(
                **typed_fields(cls, fields),
                memory=tuple([inf if limit is None else limit for limit in memory]),
                schedule=typed(str, schedule, "schedule") if is_named else Schedule.parse(schedule["text"]),
                checkpoint=typed(str if isinstance(checkpoint, str) else RecomputedStages, checkpoint, "checkpoint"),
                costs=Costs(**{**costs, "link": _link_of(costs["link"])}),
            )
            str(plan), plan.settings_with({"devices": plan.order})  # these take other numbers of values for none
            return plan
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
            raise PartitionError(
                f"this is no plan ({type(error).__name__}: {error}). Give what Plan.to_json has written."
            ) from None

    def __str__(self) -> str:
        expected, count = self.expected, max(self.lane_of) + 1
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        descriptions = {"never": "nothing", "except_last": "what another backward interrupts"}
        recomputed = (
            descriptions[self.checkpoint] if isinstance(self.checkpoint, str)
            else f"stage{'s' * (len(self.checkpoint.stages) > 1)} " + ", ".join(map(str, self.checkpoint.stages))
        )  # fmt: skip
        least, most = self.rows // self.chunks, -(-self.rows // self.chunks)
        each = f"{least} or {most}" if least < most else str(most)
        gap = f", {expected.step / expected.bound - 1:.1%} above" if expected.bound else ""
        order, limits = list(self.order), self.memory or (inf,) * count
        rows: list[tuple[str, ...]] = [("device", "stages", "layers", "busy", "state", "saved", "inputs", "peak", "of")]
        for lane, peak, busy in zip(range(count), expected.peaks, expected.busy, strict=True):
            stages = [stage for stage, host in enumerate(self.lane_of) if host == lane]
            rows.append((
                self.devices[lane] if self.devices else str(lane), " ".join(map(str, stages)),
                " ".join(str(self.balance[stage]) for stage in stages), spelt_work(busy, expected.unit),
                *map(spelt_bytes, peak), spelt_bytes(limits[lane]) if limits[lane] < inf else "any",
            ))  # fmt: skip
        orders = [f"the layers go through devices {order}, in this order"] if order != sorted(order) else []
        return "\n".join([
            *_wrapped(
                f"{name}, {self.chunks} chunks of {each} rows, {len(self.balance)} stages on "
                f"{count} devices, balance {list(self.balance)}",
                f"recomputed: {recomputed}",
                f"a step: {spelt_work(expected.step, expected.unit)}, bubble {expected.bubble:.1%}; "
                f"no order of these stages takes less than {spelt_work(expected.bound, expected.unit)}{gap}",
            ),
            *aligned(rows),
            *_wrapped(*orders, *self.notes),
        ])


def _plain(part: Any) -> dict[str, Any]:
    """A part of a plan for JSON: a Schedule as its text, a Link or RecomputedStages as their finite fields."""
    if isinstance(part, Schedule):
        return {"text": str(part)}
    return {name: value for name, value in vars(part).items() if not isinstance(part, Link) or value < inf}


def _link_of(text: Any) -> Any:
    if isinstance(text, Mapping) and "lanes" in text:
        return {typed(tuple[int, int], lanes, "link"): _link_of(link) for *lanes, link in text["lanes"]}
    return Link(**text) if isinstance(text, Mapping) else text


def _wrapped(*sentences: str) -> Iterator[str]:
    for sentence in sentences:
        yield from wrap(sentence, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
