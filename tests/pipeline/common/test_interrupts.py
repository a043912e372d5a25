"""Law: Ctrl-C at any time of a call leaves nothing in place, and the model as before or as after it.

Python runs the handler of a signal at few of its instructions: as a function begins, after one written in C, at a jump
back. A trace function sends the signal at the n-th of these; n is drawn over all of a call's.
"""

import dis
import os
import random
import signal
import sys
import threading
import time
from functools import lru_cache, partial
from itertools import pairwise

import pytest
import torch
from pipeline_probes import outside
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from partition.process_lock import _current, _lock
from pipeline import EagerUpdate, Pipe, checkpoint_blocks, eager_backward, is_checkpointing, is_recomputing
from pipeline.common import interrupts
from pipeline.curvature import Hessian

SAMPLES = 1


@lru_cache(None)
def handling(code):
    """The instructions of a function before which Python may run a handler."""
    pairs = pairwise(dis.get_instructions(code))
    behind = [(one.argval if one.opname == "JUMP_BACKWARD" else next_one.offset, one.opname) for one, next_one in pairs]
    return {offset for offset, name in behind if name.startswith(("RESUME", "CALL", "JUMP_BACKWARD"))}


class Sender:
    """Sends SIGINT the n-th time that this thread would see a signal within it."""

    def __init__(self, at):
        self.at, self.count = at, 0
        self.has_returned = False  # from a function in Python: its caller goes on without a look at signals

    def __call__(self, frame, event, arg):
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and not self.has_returned and frame.f_lasti in handling(frame.f_code):
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        self.has_returned = event == "return"
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    @property
    def is_sent(self):
        return self.count >= self.at


class AtTheEnd(Sender):
    """Sends it in what ends a section."""

    def __call__(self, frame, event, arg):
        of_end = frame.f_code.co_qualname in ("Deferral.end", "Deferral._restore", "_standing")
        return super().__call__(frame, event, arg) if of_end else None


class AtReturn(Sender):
    """Sends signals as a function returns (or a generator yields) for the n-th time, at its last instruction."""

    def __init__(self, name, at, *numbers):
        super().__init__(at)
        self.name = name
        self.numbers = numbers or (signal.SIGINT,)

    def __call__(self, frame, event, arg):
        if frame.f_code.co_qualname != self.name:
            return None
        if event == "return":
            self.count += 1
            if self.count == self.at:
                for number in self.numbers:
                    signal.raise_signal(number)
        return self


class Noisy(nn.Module):
    """A layer of the user's, with a generator of its own and hooks of autograd."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        made = x * self.weight + 0.1 * noise
        made.register_hook(lambda grad: grad * 1.0) if made.requires_grad else None
        return made


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), Noisy(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    ).double()


def data():
    torch.manual_seed(2)
    return torch.randn(6, 4).double(), torch.randn(6, 2).double()


def mse(output, target):
    return (output - target).square().mean()


class Trained:
    """A Pipe with an optimizer, and captured leaf with a hook."""

    def __init__(self, **options):
        self.module = model()
        self.captured = torch.ones(2, dtype=torch.float64, requires_grad=True)
        self.captured.register_hook(lambda grad: grad * 2.0)
        self.hook = self.module[6].register_forward_hook(partial(_times, self.captured))
        self.pipe = Pipe(self.module, [2, 2, 3], 2, **options)
        self.optimizer = torch.optim.SGD([*self.module.parameters()], lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)

    def state(self):
        found = dict(self.module.state_dict())
        found.update({f"{name}.grad": param.grad for name, param in self.module.named_parameters()})
        found["captured.grad"] = self.captured.grad
        for number, param in enumerate(self.module.parameters()):
            found[f"momentum {number}"] = self.optimizer.state.get(param, {}).get("momentum_buffer")
        found["generator"] = self.module[2].generator.get_state()
        return {name: None if value is None else value.detach().clone() for name, value in found.items()}

    def in_place(self):
        """What no call may leave changed."""
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
        return (
            [id(param) for param in self.module.parameters()],
            [(module.training, getattr(module, "momentum", None)) for module in self.module.modules()],
            [len(getattr(module, name)) for module in self.module.modules() for name in hooks],
            [len(p._backward_hooks or ()) for p in [*self.module.parameters(), self.captured]],
            [len(p._post_accumulate_grad_hooks or ()) for p in self.module.parameters()],
            [list(map(id, group["params"])) for group in self.optimizer.param_groups],
            [vars(module).get("forward") for module in self.module.modules()],
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(), torch._C._autograd._top_saved_tensors_default_hooks(False),
            is_checkpointing(), is_recomputing(), _current.get(),
            _get_current_function_mode_stack(), _get_current_dispatch_mode_stack(),
            signal.getsignal(signal.SIGINT), interrupts._calls[:], is_free(_lock),
        )


def _times(captured, module, args, output):
    return output * captured


def is_free(lock):
    """Whether another thread may have it."""
    found = []

    def take():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def step(trained, **options):
    trained.pipe.step(*data(), loss_fn=mse, **options)


def eager(trained, clip=None, **limits):
    step(trained, optimizer=EagerUpdate(trained.optimizer, clip, **limits))


def both(trained):
    mse(trained.pipe(data()[0]), data()[1]).backward()


def eagerly(trained):
    x, y = data()
    eager_backward(mse(trained.pipe(x), y), EagerUpdate(trained.optimizer))


def second_order(trained):
    x, y = data()
    params = list(trained.pipe.parameters())
    grads = torch.autograd.grad(mse(trained.pipe(x), y), params, create_graph=True)
    torch.autograd.grad(sum(grad.square().sum() for grad in grads), params)


def product(trained):
    operator = Hessian(trained.pipe, data(), nn.MSELoss())
    operator @ torch.ones(operator.shape[0]).double()


ENTRIES = {  # what runs; how the Pipe is made; in which torch's state
    "step": (step, {"checkpoint": "always"}),
    "gpipe": (step, {"schedule": "gpipe", "deferred_batch_norm": True}),
    "zero bubble": (step, {"schedule": "zb-h1"}),
    "threads": (step, {"workers": "threads"}),
    "optimizer": (lambda trained: step(trained, optimizer=trained.optimizer, clip_grad_norm=0.1), {}),
    "scaler": (lambda trained: step(trained, optimizer=trained.optimizer, scaler=trained.scaler), {}),
    "eager": (eager, {"checkpoint": "always"}),
    "two runs": (partial(eager, clip="two_pass", max_norm=0.1), {}),
    "evaluate": (lambda trained: trained.pipe.evaluate(*data(), loss_fn=mse), {}),
    "forward": (lambda trained: trained.pipe(data()[0]), {}),
    "backward": (both, {"checkpoint": "always"}),
    "backward, deferred": (both, {"checkpoint": "always", "deferred_batch_norm": True}),
    "eager backward": (eagerly, {}),
    "second order": (second_order, {}),
    "product": (product, {}),
}


def same_value(one, other):
    return one is other if one is None or other is None else torch.equal(one, other)


def made(entry, calls_before):
    """Something to train, after some calls: the first ones look at more than the third."""
    trained = Trained(**ENTRIES[entry][1])
    for _ in range(calls_before):
        ENTRIES[entry][0](trained)
    return trained


@pytest.fixture(autouse=True)
def _default_handler():
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@lru_cache(None)
def reached(entry, calls):
    """The state after some calls, and after the first half of one more, where that is a call of its own."""
    trained = made(entry, calls)
    then = [trained.state()]
    if "backward" in entry or entry == "second order":
        trained.pipe(data()[0])
        then.append(trained.state())
    return then


def check(entry, calls_before, sender):
    """Interrupt a call, and look. A step is made, or not; and the next one is right."""
    trained = made(entry, calls_before)
    places = trained.in_place()
    try:
        with sender:
            ENTRIES[entry][0](trained)
        assert not sender.is_sent, "no KeyboardInterrupt"
    except KeyboardInterrupt:
        sys.settrace(None)
    assert trained.in_place() == places
    now = trained.state()
    ends = [*reached(entry, calls_before), reached(entry, calls_before + 1)[0]]
    wrong = [[name for name in now if not same_value(now[name], end[name])] for end in ends]
    assert [] in wrong, f"in {entry}, differ from before, from between, from after: {wrong}"
    plain = made(entry, calls_before + (wrong[-1] == []))
    plain.pipe.load_state_dict(trained.pipe.state_dict())
    for each in (trained, plain):
        each.module.zero_grad()
        each.captured.grad = None
        each.module[2].generator.manual_seed(5)
        step(each)
    assert [name for name, value in trained.state().items() if not same_value(value, plain.state()[name])] == []


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_interrupt_at_any_time_leaves_nothing_in_place(entry, calls_before):
    counts = []
    for _ in range(2):  # from Python 3.12 on a trace function may see no instructions the first time
        trained = made(entry, calls_before)
        with Sender(0) as counting:
            ENTRIES[entry][0](trained)
        counts.append(counting.count)
    draws = random.Random(f"{entry} {calls_before}")
    for _ in range(SAMPLES):
        check(entry, calls_before, Sender(draws.randrange(1, max(counts))))


def is_interrupted_at_the_end(at):
    """Whether an interrupt came at an instruction of what ends a section; it has left no handler in place."""
    section = interrupts.Deferral()
    section.begin()
    is_interrupted = False
    try:
        with AtTheEnd(at):
            section.end()
    except KeyboardInterrupt:
        sys.settrace(None)
        is_interrupted = True
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not section.is_on, at
    return is_interrupted


def test_an_interrupt_at_any_time_of_a_sections_end_leaves_no_handler_in_place():
    """One that came while handlers were put back left those that had not been."""
    # Twice each: Python 3.13 shows a trace function no instructions of the first call after another trace.
    interrupted = [at for at in range(1, 400) if is_interrupted_at_the_end(at) or is_interrupted_at_the_end(at)]
    assert interrupted == list(range(1, len(interrupted) + 1)) and 5 < len(interrupted) < 399


MECHANISMS = {  # functions of which a part is in place when they return
    "Swap.__enter__": "step", "Swap.__exit__": "step", "SavingNothing.__enter__": "step",
    "SavingNothing.__exit__": "step", "recomputing": "step",
    "StrayGradientGuard.__enter__": "step", "GeneratorGuard.__enter__": "step", "GeneratorGuard.__exit__": "step",
    "DeferredBatchNorms.within.<locals>.before": "gpipe", "_put_back": "gpipe", "DeferredBatchNorms.commit": "gpipe",
    "waiting": "zero bubble",
    "hooks_asleep": "step", "grads_kept": "optimizer", "finish_backward": "step", "collect": "optimizer",
    "OptimizerSink.take": "optimizer", "OptimizerSink.finish": "scaler", "step_one": "eager",
    "GradientFinalizer._begin": "eager", "Module.train": "evaluate", "Runtime.agreed": "evaluate",
    "turn": "forward", "StageRun.commit": "forward", "Buffers.as_before": "backward",
    "generators_at": "backward", "deliver": "backward", "add_hooked": "backward",
    "_taking": "eager backward", "Gate.closed": "second order",
    "_set": "product", "StageRule.forward": "product",
}  # fmt: skip


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("time", [1, 2])
def test_an_interrupt_as_a_mechanism_is_put_in_place_or_taken_back(name, time):
    sender = AtReturn(name, time)
    check(MECHANISMS[name], 0, sender)
    assert sender.is_sent or time > 1


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(
    "name", ["replayed", "replayed.<locals>.compute_again", "generators_at"]
)
def test_an_interrupt_in_a_checkpointed_block_leaves_nothing_in_place(name, at):
    trained = Trained()
    blocks = checkpoint_blocks(trained.module, lambda name, _: name in ("0", "2", "4"))
    places, before = trained.in_place(), vars(trained.module[2]).copy()
    sender = AtReturn(name, at)
    with pytest.raises(KeyboardInterrupt), sender:
        mse(trained.module(data()[0]), data()[1]).backward()
    sys.settrace(None)
    assert sender.is_sent and trained.in_place() == places and vars(trained.module[2]) == before
    blocks.remove()


# ------------------------------------------------------------------------------------------------- whose code, and when


class Hangs(nn.Module):
    """Never returns, once it is told so."""

    def __init__(self, where):
        super().__init__()
        self.where, self.hangs = where, False
        self.turns = outside([])

    def forward(self, x):
        self.hang("forward")
        x.register_hook(lambda grad: self.hang("backward")) if x.requires_grad else None
        return x * 1.0

    def hang(self, where):
        while self.hangs and self.where == where:
            self.turns().append(1)
            time.sleep(0.001)


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "optimizer"])
def test_what_hangs_is_left_at_once_in_the_users_code_and_at_the_third_interrupt_in_the_rest(where):
    hangs = Hangs(where)
    module = nn.Sequential(nn.Linear(4, 6), hangs, nn.BatchNorm1d(6), nn.Linear(6, 2)).double()

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            hangs.hang("optimizer")
            return super().step()

    def loss_fn(output, target):
        hangs.hang("loss")
        return mse(output, target)

    pipe, optimizer = Pipe(module, [2, 2], 2), Optimizer(module.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    hangs.hangs, over = True, threading.Event()

    def send():
        for _ in range(3 if where == "optimizer" else 1):
            turns = len(hangs.turns())
            while len(hangs.turns()) < turns + 3:  # it hangs, and what was sent before has been handled
                if over.wait(0.001):
                    return
            os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(60):
            hangs.hangs = False

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*data(), loss_fn=loss_fn, optimizer=optimizer)
        assert hangs.hangs, "late"
    finally:
        hangs.hangs = False
        over.set()
        thread.join()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())
    pipe.step(*data(), loss_fn=loss_fn, optimizer=optimizer)


def test_a_handler_that_returns_is_called_for_each_signal_and_the_call_goes_on():
    trained, plain, came = Trained(), Trained(), []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    with AtReturn("Swap.__enter__", 1) as sender:
        step(trained)
    assert sender.is_sent and came == [signal.SIGINT]
    step(plain)
    assert all(same_value(value, plain.state()[name]) for name, value in trained.state().items())


def test_of_signals_that_wait_together_each_is_handled_also_if_the_handler_of_the_first_raises():
    came = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), AtReturn("Swap.__enter__", 1, signal.SIGINT, signal.SIGUSR1):
            step(Trained())
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert came == [signal.SIGUSR1]


def test_a_handler_that_a_layer_sets_is_the_one_that_stays():
    def mine(number, frame):
        raise AssertionError

    class Sets(nn.Module):
        def forward(self, x):
            signal.signal(signal.SIGINT, mine)
            return x

    Pipe(nn.Sequential(nn.Linear(4, 2), Sets()), [1, 1], 2)(torch.ones(4, 4))
    assert signal.getsignal(signal.SIGINT) is mine


def test_calls_in_other_threads_leave_handlers_alone():
    trained, found = Trained(), []

    class Looks(nn.Module):
        def forward(self, x):
            found.append(signal.getsignal(signal.SIGINT))
            return x

    trained.pipe[5].register_forward_hook(lambda *_: found.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=step, args=(trained,))
    thread.start()
    thread.join()
    assert set(found) == {signal.default_int_handler}
    step(trained)
    assert found[-1] is not signal.default_int_handler and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_section_may_end_in_another_thread_and_the_next_one_puts_the_handlers_back():
    """As autograd ends a backward: in the thread of a device."""
    deferral, came = interrupts.Deferral(), []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(threading.current_thread()))
    mine = signal.getsignal(signal.SIGINT)
    for times in 1, 3:
        deferral.begin()
        signal.raise_signal(signal.SIGINT)
        assert len(came) == times - 1
        thread = threading.Thread(target=deferral.end)
        thread.start()
        thread.join()
        assert came == [threading.main_thread()] * times
        signal.raise_signal(signal.SIGINT)
        assert len(came) == times + 1
    deferral.begin()
    deferral.end()
    assert signal.getsignal(signal.SIGINT) is mine and len(came) == 4
