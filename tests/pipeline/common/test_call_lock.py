"""Law 10: calls of Pipes from several threads are those calls one after the other; nothing waits for ever."""

import copy
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
import torch
from by_chunks import assert_same_grads
from law_models import Apply, normal
from torch import Tensor, nn

from partition import profile, to_sequential
from partition.process_lock import LockHold, _lock, run_in
from pipeline import Pipe
from pipeline.common.call_lock import turn
from pipeline.common.places import Place

CPU = torch.device("cpu")
WORKERS = ("inline", "threads")
PATIENCE = 20.0  # seconds


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before
    assert not in_thread(lambda: is_taken())


def in_thread(*functions: Callable[[], Any]) -> Any:
    """Call functions, each in a thread, at one time; what the only one returned, or what all of them did."""
    found: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    gate = threading.Barrier(len(functions))

    def work(number: int) -> None:
        try:
            gate.wait(PATIENCE)
            found[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"no end after {PATIENCE} s"
    if errors:
        raise errors[0]
    return found[0] if len(functions) == 1 else found


def is_taken() -> bool:
    """Whether this thread would have to wait for its turn."""
    is_free = _lock.acquire(blocking=False)
    if is_free:
        _lock.release()
    return not is_free


# ---------------------------------------------------------------------------------------------------------- the turn


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork, beside threads
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    """As a worker of a DataLoader, whose data set calls a Pipe, while a thread trains."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        with turn():
            begun.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(PATIENCE)
    child = multiprocessing.get_context("fork").Process(target=turn().__enter__)
    child.start()
    child.join(PATIENCE)
    child.kill()
    over.set()
    thread.join()
    assert child.exitcode == 0


def test_within_a_turn_others_wait_and_afterwards_they_do_not() -> None:
    with turn() as now:
        assert now.is_on and in_thread(is_taken)
    assert not now.is_on and not in_thread(is_taken)


def test_a_turn_within_a_turn_is_the_same_turn_and_ends_with_the_outer_one() -> None:
    with turn() as outer:
        with turn() as inner, turn() as innermost:
            assert inner is outer and innermost is outer
        assert outer.is_on and in_thread(is_taken)
    assert not outer.is_on


def test_a_thread_that_works_for_a_turn_is_part_of_it() -> None:
    with turn() as outer:
        context = copy_context()

        def work() -> LockHold:
            with turn() as inner:
                return inner

        assert in_thread(lambda: context.run(work)) is outer
        assert outer.is_on and in_thread(is_taken)


def test_a_backward_within_the_turn_of_its_forward_is_part_of_it_in_any_thread() -> None:
    """autograd may work in a thread that knows no context."""
    with turn() as outer:

        def work() -> tuple[LockHold, bool]:
            with turn(outer) as found:
                with turn() as inner:
                    return found, inner is outer

        assert in_thread(work) == (outer, True)
        assert outer.is_on


def test_a_backward_after_the_turn_of_its_forward_has_a_turn_of_its_own() -> None:
    with turn() as earlier:
        pass
    with turn(earlier) as found:
        assert found is not earlier and found.is_on and in_thread(is_taken)
    context = copy_context()

    def work() -> LockHold:
        with turn() as fresh:
            return fresh

    with turn() as old:
        context = copy_context()
    assert context.run(work) is not old


def test_what_runs_in_an_earlier_context_is_part_of_the_turn_that_runs_now_and_leaves_no_trace() -> None:
    number: ContextVar[int] = ContextVar("number", default=0)

    def work(more: int) -> tuple[int, LockHold]:
        number.set(number.get() + more)
        with turn() as found:
            return number.get(), found

    with turn():
        number.set(1)
        context = copy_context()
    number.set(5)
    for _ in range(2):
        with turn() as now:
            assert run_in(context, work, 2) == (3, now)
    assert number.get() == 5 and context[number] == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_turn(error: type[BaseException]) -> None:
    with pytest.raises(error):
        with turn() as outer:
            with pytest.raises(error):
                with turn():
                    raise error
            assert in_thread(is_taken)
            raise error
    assert not outer.is_on and not in_thread(is_taken)


def test_turns_of_many_threads_never_overlap_and_all_come() -> None:
    inside, most, done = [0], [0], [0]

    def work() -> None:
        for _ in range(200):
            with turn():
                inside[0] += 1
                with turn():
                    most[0] = max(most[0], inside[0])
                    done[0] += 1
                inside[0] -= 1

    in_thread(*[work] * 5)
    assert most == [1] and done == [1000]


# --------------------------------------------------------------------------------------------------- calls from threads


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def piped(model: nn.Sequential, workers: str, chunks: int = 3) -> Pipe:
    return Pipe(model, [2, 2, 1], chunks, devices=[Place(CPU, name) for name in "aba"], workers=workers)


def square(out: Tensor, target: Any = None) -> Tensor:
    return out.square().sum()


def numbers(pipe: Pipe, x: Tensor, entry: str, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Output or loss, and gradients, of one call; touches no `.grad`.

    `parameters`: read before, since in a thread they would be the aliases of whatever call runs at that time.
    """
    if entry == "step":
        step = pipe.step(x, loss_fn=square, loss_reduction="sum", grads="store")
        return [step.loss, *[grad for _, grad in step.grads.items()]]
    out = pipe(x)
    return [out.detach(), *torch.autograd.grad(square(out), parameters)]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_from_several_threads_give_the_numbers_of_serial_calls(count: int, workers: str) -> None:
    """Of one Pipe, and of two; three threads each."""
    pipes = [piped(net(), workers) for _ in range(count)]
    owners = [list(pipe.parameters()) for pipe in pipes]
    jobs = [
        (pipes[k % count], normal(7, 4, seed=k), entry, owners[k % count])
        for k in range(3)
        for entry in ("forward", "step")
    ]
    expected = [numbers(*job) for job in jobs]
    generator = torch.get_rng_state()

    def work(number: int) -> None:
        for _ in range(6):
            assert equal(numbers(*jobs[number]), expected[number])

    in_thread(*[lambda number=number: work(number) for number in range(len(jobs))])
    after = torch.get_rng_state()
    torch.set_rng_state(generator)
    torch.stack([torch.empty((), dtype=torch.int64).random_() for _ in range(6 * len(jobs))])
    assert torch.equal(after, torch.get_rng_state())  # one draw for each call, and nothing else


class Blocks(nn.Module):
    """Blocks with dropout, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_cuts_and_profiles_in_threads_do_not_disturb_each_other_nor_calls() -> None:
    """Each seeds the default generators; a cut watches the class of all modules."""
    pipe = piped(nn.Sequential(*[nn.Sequential(layer, nn.Dropout(0.5)) for layer in net()]), "inline")
    x, parameters, measured, models = normal(7, 4), list(pipe.parameters()), net(), [Blocks().double() for _ in "ab"]
    methods, generator = dict(vars(nn.Module)), torch.get_rng_state()
    expected = [numbers(pipe, x, "forward", parameters) for _ in range(4)]
    torch.set_rng_state(generator)

    def cut(model: nn.Module) -> None:
        for _ in range(3):
            assert len(to_sequential(model, x)) == 5

    def measure() -> None:
        for _ in range(3):
            profile(measured, x, device="meta")

    def call() -> None:
        assert all([equal(numbers(pipe, x, "forward", parameters), earlier) for earlier in expected])

    in_thread(call, measure, *[lambda model=model: cut(model) for model in (models[0], *models)])
    assert vars(nn.Module) == methods
    # Not within: another thread may be cutting the same model then, in eval mode.
    assert all([module.training for model in models for module in model.modules()])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_gradients_that_two_threads_add_are_all_there(entry: str, workers: str) -> None:
    """Twice the same number, so that their order does not matter."""
    ours, theirs = net(), net()
    pipe, x = piped(ours, workers), normal(7, 4)

    def call(pipe: Pipe) -> None:
        if entry == "step":
            pipe.step(x, loss_fn=square, loss_reduction="sum")
        else:
            square(pipe(x)).backward()

    in_thread(lambda: call(pipe), lambda: call(pipe))
    serial = piped(theirs, "inline")
    call(serial)
    call(serial)
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("workers", WORKERS)
def test_masks_of_calls_from_threads_are_those_of_the_seeds_that_they_drew(workers: str) -> None:
    """Which thread draws which seed is chance; but all the outputs are those of so many serial calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5), nn.Identity()).double()
    pipe, x = piped(model, workers), normal(7, 4)

    def outputs() -> list[Tensor]:
        return [pipe(x).detach() for _ in range(4)]

    torch.manual_seed(3)
    expected = {tuple(out.flatten().tolist()) for _ in range(3) for out in outputs()}
    torch.manual_seed(3)
    found = {tuple(out.flatten().tolist()) for each in in_thread(*[outputs] * 3) for out in each}
    assert found == expected and len(found) == 12


def test_pipes_that_share_layers_do_not_see_each_others_aliases() -> None:
    model = net()
    one, other = piped(model, "threads"), Pipe(model, [1, 4], 2)
    x, owners = normal(7, 4), list(model.parameters())
    expected = [numbers(one, x, "forward", owners), numbers(other, x, "forward", owners)]

    def work(pipe: Pipe, numbers_of: list[Tensor]) -> None:
        for _ in range(8):
            assert equal(numbers(pipe, x, "forward", owners), numbers_of)

    in_thread(lambda: work(one, expected[0]), lambda: work(other, expected[1]))
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize("workers", WORKERS)
def test_a_failed_call_in_one_thread_leaves_those_of_others_right(workers: str) -> None:
    good, bad, x = piped(net(), workers), piped(net(), workers), normal(7, 4)
    parameters = list(good.parameters())
    expected = numbers(good, x, "forward", parameters)

    def burn(out: Tensor) -> Tensor:
        raise ValueError("burnt")

    bad.to_sequential()[3].register_forward_hook(lambda module, args, out: burn(out))

    def fails() -> None:
        for _ in range(8):
            with pytest.raises(ValueError, match="burnt"):
                numbers(bad, x, "forward", parameters)

    def works() -> None:
        for _ in range(8):
            assert equal(numbers(good, x, "forward", parameters), expected)

    in_thread(fails, works)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_forward_in_one_thread_may_have_its_backward_in_another(workers: str) -> None:
    pipe, x = piped(net(), workers), normal(7, 4)
    parameters = list(pipe.parameters())
    expected = numbers(pipe, x, "forward", parameters)
    outs = in_thread(lambda: pipe(x), lambda: pipe(x))
    found = in_thread(*[lambda out=out: torch.autograd.grad(square(out), parameters) for out in reversed(outs)])
    assert all(equal([outs[0].detach(), *grads], expected) for grads in found)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_call_within_a_layer_does_not_wait_for_itself_while_others_wait_for_it(workers: str) -> None:
    inner, x = piped(net(), "threads", 2), normal(7, 4)

    def doubled(value: Tensor) -> Tensor:
        inner(normal(4, 4)).sum()
        return value * 2

    model = nn.Sequential(nn.Linear(4, 4), Apply(doubled), nn.Linear(4, 4), Apply(doubled), nn.Identity()).double()
    pipe = piped(model, workers)
    expected = [numbers(pipe, x, "step", ()), numbers(inner, x, "step", ())]

    def work(pipe: Pipe, numbers_of: list[Tensor]) -> None:
        for _ in range(4):
            assert equal(numbers(pipe, x, "step", ()), numbers_of)

    in_thread(lambda: work(pipe, expected[0]), lambda: work(inner, expected[1]))


def test_a_call_in_a_thread_that_a_layer_starts_is_part_of_its_call_with_a_copy_of_the_context() -> None:
    inner, x = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), [1, 1], 2), normal(7, 4)

    def in_a_thread(value: Tensor) -> Tensor:
        out: Tensor = in_thread(lambda context=copy_context(): context.run(inner, value))
        return out

    model = nn.Sequential(nn.Linear(4, 4), Apply(in_a_thread), nn.Linear(4, 4)).double()
    pipe = Pipe(model, [1, 2], 3, checkpoint="never")
    assert torch.allclose(pipe(x), model[2](inner(model[0](x))), rtol=0, atol=1e-15)


class Waiting(torch.optim.SGD):
    """Waits before its step, so that another thread's call may come in between if it can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.delivered = threading.Event()

    def step(self, closure: Any = None) -> None:
        self.delivered.wait(0.2)
        super().step()


def test_steps_with_an_optimizer_from_two_threads_are_two_steps() -> None:
    ours, theirs, x = net(), net(), normal(7, 4)
    pipe, serial = piped(ours, "inline"), piped(theirs, "inline")
    optimizer = Waiting(ours.parameters(), lr=0.01)

    def step() -> None:
        pipe.step(x, loss_fn=square, loss_reduction="sum", optimizer=optimizer)

    in_thread(step, step)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(2):
        serial.step(x, loss_fn=square, loss_reduction="sum", optimizer=reference)
    assert equal([param.detach() for param in ours.parameters()], [param.detach() for param in theirs.parameters()])


@pytest.mark.xfail(strict=True, reason="while a call runs, its aliases stand in the modules for every thread to see")
def test_parameters_that_are_read_while_another_threads_call_runs_are_the_parameters() -> None:
    begun, read = threading.Event(), threading.Event()

    def wait(value: Tensor) -> Tensor:
        begun.set()
        read.wait(0.5)
        return value

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Apply(wait)), [2])
    expected = list(pipe.parameters())

    def reads() -> list[Tensor]:
        assert begun.wait(PATIENCE)
        try:
            return list(pipe.parameters())
        finally:
            read.set()

    _, found = in_thread(lambda: pipe(torch.ones(2, 4)), reads)
    assert list(map(id, found)) == list(map(id, expected))


def test_a_copy_of_a_pipe_computes_the_same_in_another_thread() -> None:
    pipe, x = piped(net(), "threads"), normal(7, 4)
    twin = copy.deepcopy(pipe)
    owners, twins = list(pipe.parameters()), list(twin.parameters())
    expected = numbers(pipe, x, "forward", owners)
    for found in in_thread(lambda: numbers(pipe, x, "forward", owners), lambda: numbers(twin, x, "forward", twins)):
        assert equal(found, expected)
