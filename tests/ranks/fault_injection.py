"""Where and how does a rank fail? At one point of one call, in one of many ways.

    a rank's script arms a Fault ──► layers, loss, hooks, optimizer, every action pass `point(...)` ──► it fails there

    sites      before, after   an action of any kind, before its work and after it
               layer           a layer's forward;  recompute: when that runs once more
               gradient        a layer's backward, in an autograd Function
               loss, hook, post hook, optimizer; open: a call begins;  connect: its first phase;  materialize: a Pipe
               script: between calls;  begin: before there is a Pipe
    manners    a name of EXCEPTIONS; kill, stop, sleep
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline import is_recomputing
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.connections import Connections
from pipeline.execution.call import Call
from pipeline.execution.execution import WorkTable
from scheduler import Action, Kind


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        rank: on which rank.
        site: at which kind of point.
        manner: how.
        action: in which action, as text; "" where the site is in none, or in any.
        seconds: for which it sleeps before.
    """

    rank: int
    site: str
    manner: str
    action: str = ""
    seconds: float = 0.0


class ScriptError(Exception):
    """Of a module that all ranks have."""


class ExactingError(Exception):
    """Cannot be made from its words."""

    def __init__(self, layer: str, *, value: float, limit: float) -> None:
        super().__init__(f"{layer}: {value} is above {limit}")


class MuteError(Exception):
    """Has no words."""

    def __str__(self) -> str:
        raise ValueError("no words")


class MainError(Exception):
    """Of the script itself: fault_script.py says that this is its module, __main__."""


def _stranger() -> Exception:
    """Of a type that other ranks cannot find."""
    return type("Stranger", (Exception,), {"__module__": "nowhere.at.all"})("made on this rank")


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("the value 3 is not what it should be"),
    "KeyError": lambda: KeyError("missing"),
    "ZeroDivisionError": lambda: ZeroDivisionError("division by zero"),
    "ScriptError": lambda: ScriptError("a user's own, in two\nlines"),
    "MainError": lambda: MainError("of the script's own module"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "AssertionError": lambda: AssertionError(),
    "StopIteration": lambda: StopIteration(),
    "RuntimeError": lambda: RuntimeError("x" * 30_000),
    "ExactingError": lambda: ExactingError("layer 3", value=7.5, limit=1.0),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "MuteError": lambda: MuteError(),
    "Stranger": _stranger,
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
    "SystemExit": lambda: SystemExit(3),
}
AS_TEXT = ("ExactingError", "UnicodeDecodeError", "MuteError", "Stranger", "KeyboardInterrupt", "SystemExit")
"""Those that the other ranks cannot make, or should not: they raise a RankError with their name and words."""

_armed: Fault | None = None
_now: Action | None = None  # the action under way


def arm(fault: Fault | None) -> None:
    """From now on this rank fails so, once."""
    global _armed
    _armed = fault


def point(site: str) -> None:
    """Here this rank fails, if that is its fault."""
    fault = _armed
    if fault is not None and fault.site == site and fault.action in ("", str(_now)):
        arm(None)
        tell("fault")
        _fail(fault)


def _fail(fault: Fault) -> None:
    time.sleep(fault.seconds)
    if fault.manner == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.manner == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.manner != "sleep":
        raise EXCEPTIONS[fault.manner]()


def tell(what: str, **more: Any) -> None:
    """Write down what happened, at once: this rank may not live to tell more."""
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")


# ------------------------------------------------------------------------------------------------------ the sites


class Point(nn.Module):
    """A layer that passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        point("recompute" if is_recomputing() else "layer")
        found: Tensor = _Passed.apply(x)  # type: ignore[no-untyped-call]  # torch's
        return found


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        point("gradient")
        return grad


class PointAdam(torch.optim.Adam):
    """Fails before it changes anything."""

    def step(self, closure: Any = None) -> Any:
        point("optimizer")
        return super().step(closure)


def hook_parameter(parameter: nn.Parameter) -> None:
    """Hooks on its gradient, and after that was added."""

    def hook(_: Tensor) -> None:
        point("hook")

    def post_hook(_: Tensor) -> None:
        point("post hook")

    parameter.register_hook(hook)
    parameter.register_post_accumulate_grad_hook(post_hook)


def watch_actions() -> None:
    """Make every action pass two points, by the table of what actions do; and calls some, over ranks."""
    Connections.connect = _connecting(Connections.connect)  # type: ignore[method-assign]
    DistributedCommunicator.open = _opening(DistributedCommunicator.open)  # type: ignore[method-assign]
    Call._work = _working(Call._work)  # type: ignore[method-assign]


def _connecting(connect: Callable[..., None]) -> Callable[..., None]:
    def connecting(connections: Connections, *args: Any) -> None:
        if not connections.are_closed:
            point("connect")
        connect(connections, *args)

    return connecting


def _opening(open: Callable[..., int]) -> Callable[..., int]:
    def opening(communicator: DistributedCommunicator, *args: Any, **settings: Any) -> int:
        point("open")
        return open(communicator, *args, **settings)

    return opening


def _working(work: Callable[[Call, bool], WorkTable]) -> Callable[[Call, bool], WorkTable]:
    def working(call: Call, retain: bool) -> WorkTable:
        return {kind: _watched(kind, does) for kind, does in work(call, retain).items()}

    return working


def _watched(kind: Kind, work: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def watched(stage: int, chunk: int) -> None:
        global _now
        _now = Action(stage, kind, chunk)
        point("before")
        work(stage, chunk)
        point("after")
        _now = None

    return watched
