"""The script of a rank that fails: rounds of training, in each of which a fault may be due.

    one process, no fault    every round's loss, and parameters and buffers after it
    this rank                a round with a fault: what is raised here? is everything as it was before?
                             the same round once more: does it give what it gives in one process?

`python fault_script.py` is the nursery of fault_launcher.py: of it a process is forked for each rank.
"""

from __future__ import annotations

import atexit
import os
import threading


@atexit.register
def _last_words() -> None:
    """Runs last, since it was registered before anything of torch's and of ours."""
    if "TOLD" in os.environ:
        tell("gone", threads=threads())


def threads() -> list[str]:
    """Threads besides the main one."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from typing import Any  # noqa: E402

import fault_injection  # noqa: E402
import probing  # noqa: E402
import torch._dynamo  # noqa: E402 (else optimizers import it, in each process)
from absent_devices import leave_absent_devices_unseeded  # noqa: E402
from fault_injection import Fault, Point, PointAdam, arm, hook_parameter, point, tell, watch_actions  # noqa: E402
from nursery import serve  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from pipeline import Pipe  # noqa: E402

WIDTH, CLASSES, ROWS = 6, 3, 12
MainError = fault_injection.MainError
MainError.__module__, MainError.__qualname__ = "__main__", "MainError"

Job = dict[str, Any]
State = dict[str, Tensor | None]


def layers_of(stages: int) -> nn.Sequential:
    """Three layers a stage: weights and a batch norm, a point to fail at, dropout."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for stage in range(stages):
        wide = CLASSES if stage == stages - 1 else WIDTH
        layers += [nn.Sequential(nn.Linear(WIDTH, wide), nn.BatchNorm1d(wide)), Point(), nn.Dropout(0.2)]
    return nn.Sequential(*layers).double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    point("loss")
    return functional.cross_entropy(output, target)


def fill(layer: nn.Module) -> None:
    """For a Pipe on the meta device."""
    point("materialize")
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.data.zero_()


class Training:
    """A Pipe, its optimizer, and rounds of both.

    Args:
        job: see fault_cases.py.
        over_ranks: or in this process.
    """

    def __init__(self, job: Job, over_ranks: bool) -> None:
        self._stages: int = job["stages"]
        self._settings: dict[str, Any] = {"chunks": job["chunks"], "schedule": job["schedule"]}
        self._settings["checkpoint"] = job["checkpoint"]
        if over_ranks:
            self._settings.update(heartbeat=job["heartbeat"], timeout=job["timeout"])
        else:
            self._settings["devices"] = ["cpu"] * self._stages
        self.pipe = Pipe(layers_of(self._stages), [3] * self._stages, **self._settings)
        if over_ranks:
            hook_parameter(next(iter(self.pipe.parameters())))
        self.optimizer = PointAdam(self.pipe.parameters(), lr=0.05)
        self.has_forwarded = False  # in this round

    def round(self, number: int, entry: str, spoiled: str = "") -> float:
        """One mini-batch through an entry point; the loss."""
        generator = torch.Generator().manual_seed(number)
        x: Any = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        y = torch.randint(CLASSES, (ROWS,), generator=generator)
        torch.manual_seed(number)
        self.has_forwarded = False
        if spoiled == "cut":
            x = {1, 2, 3}
        if spoiled == "target":
            y = y[:-1]
        return float(getattr(self, f"_by_{entry}")(x, y))

    def _by_step(self, x: Any, y: Tensor) -> float:
        return self.pipe.step(x, y, loss_fn=loss_of, optimizer=self.optimizer).loss.item()

    def _by_gradients(self, x: Any, y: Tensor) -> float:
        loss = self.pipe.step(x, y, loss_fn=loss_of).loss.item()
        self._apply()
        return loss

    def _by_evaluate(self, x: Any, y: Tensor) -> float:
        return self.pipe.evaluate(x, y, loss_fn=loss_of).loss.item()

    def _by_forward(self, x: Any, y: Tensor) -> float:
        output = self.pipe(x)
        self.has_forwarded = True
        point("gap")
        loss = functional.cross_entropy(output, y)
        loss.backward()
        self._apply()
        return loss.item()

    def _by_pipe(self, x: Any, y: Tensor) -> float:
        """Another Pipe, which is trained, too."""
        with torch.device("meta"):
            other = layers_of(self._stages)
        kept, self.pipe = self.pipe, Pipe(other, [3] * self._stages, materialize=fill, **self._settings)
        try:
            return self._by_evaluate(x, y)
        finally:
            self.pipe = kept

    def _apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """All that a step changes, copied."""
        found: State = {}
        for name, value in [*self.pipe.named_parameters(), *self.pipe.named_buffers()]:
            found[name] = value.detach().clone()
            found[f"gradient of {name}"] = None if value.grad is None else value.grad.clone()
        for index, each in enumerate(self.optimizer.state.values()):
            found.update({f"optimizer {index} {key}": value.clone() for key, value in each.items()})
        return found

    def put_back(self, state: State) -> list[str]:
        """Give the buffers their values of then; their names."""
        with torch.no_grad():
            for name, buffer in self.pipe.named_buffers():
                buffer.copy_(state[name])  # type: ignore[arg-type]  # it is there
        return [name for name, _ in self.pipe.named_buffers()]


def differences(here: State, other: State) -> list[str]:
    """The names of what is not the same to the bit."""
    return [name for name in sorted({*here, *other}) if not _same(here.get(name), other.get(name))]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def main(order: Mapping[str, Any]) -> None:
    os.environ.update(order["environment"])
    probing.follow(os.environ)
    run(order["job"])


def run(job: Job) -> None:
    rank = int(os.environ["RANK"])
    rounds = [(entry, None if fault is None else Fault(*fault)) for entry, fault in job["rounds"]]
    expected = reference(job)
    if job["first"] and job["first"][0] == rank:
        arm(Fault(*job["first"]))
    point("begin")
    if job["first"] and job["goes_on"]:
        try:
            Training(job, over_ranks=True)
        except Exception as error:
            tell("raised", number=-1, **described(error))
    training = Training(job, over_ranks=True)
    for number, (entry, fault) in enumerate(rounds):
        if fault is not None:
            failing_round(training, job, number, fault, rank)
        if fault is None or job["goes_on"]:
            right_round(training, number, entry, expected[number])
    tell("end")


def reference(job: Job) -> list[tuple[float, State]]:
    """What the rounds give in one process."""
    training = Training(job, over_ranks=False)
    return [(training.round(number, entry), training.state()) for number, (entry, _) in enumerate(job["rounds"])]


def failing_round(training: Training, job: Job, number: int, fault: Fault, rank: int) -> None:
    """A round in which a rank fails: what does this one raise, and has anything changed?"""
    before = training.state()
    entry: str = job["rounds"][number][0]
    if job["also"] and job["also"][0] == rank:
        fault = Fault(*job["also"])
    if fault.rank != rank:
        attempt(training, number, entry)
    elif fault.site == "call":
        tell("fault")
        attempt(training, number, fault.manner)  # another call than the others make
    elif fault.site == "script" and fault.manner == "leave":
        tell("fault")
        sys.exit(0)
    elif fault.site == "script" and fault.manner == "crash":
        tell("fault")
        raise fault_injection.ScriptError("nobody catches this")
    elif fault.site == "gap":
        arm(fault)
        try:
            training.round(number, entry)
        except fault_injection.ScriptError:
            pass  # of the script, between two calls: the others wait in the second, which this rank will not make
        attempt(training, number, "evaluate")
        training.has_forwarded = True
    elif fault.site in ("cut", "target"):
        tell("fault")
        attempt(training, number, entry, spoiled=fault.site)
    else:
        arm(fault)
        point("script")
        attempt(training, number, entry)
        arm(None)
    changed = differences(training.state(), before)
    if training.has_forwarded:  # that is the plain module's way, too: the backward failed, not the forward
        changed = sorted(set(changed) - set(training.put_back(before)))
    tell("state", number=number, changed=changed)
    if fault.rank != rank:
        time.sleep(job["rest"])


def attempt(training: Training, number: int, entry: str, spoiled: str = "") -> None:
    """A call that is to fail."""
    try:
        training.round(number, entry, spoiled)
    except BaseException as error:
        tell("raised", number=number, **described(error))
    else:
        tell("passed", number=number)


def right_round(training: Training, number: int, entry: str, expected: tuple[float, State]) -> None:
    """A round that is to go well, and to give what it gives in one process."""
    loss, theirs = expected
    try:
        found = training.round(number, entry)
    except BaseException as error:
        tell("lost", number=number, **described(error))
        return
    here = {name: value for name, value in training.state().items() if not name.startswith("optimizer")}
    wrong = differences(here, {name: theirs[name] for name in here})
    tell("went on", number=number, wrong=[f"loss {found} instead of {loss}"] * (found != loss) + wrong)


def described(error: BaseException) -> Job:
    """An error in words."""
    try:
        words = str(error)
    except Exception:
        words = ""
    cause = "" if error.__cause__ is None else str(error.__cause__)
    notes = getattr(error, "__notes__", [])
    return {"type": type(error).__name__, "words": words[:3000], "notes": notes, "cause": cause[:1500] + cause[-1500:]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    leave_absent_devices_unseeded()
    watch_actions()
    serve(main)
