import subprocess
import sys

import numpy
import pytest

import scheduler
from scheduler import Costs, Placement, ScheduleError, by_name, simulate


def test_importing_scheduler_leaves_torch_out():
    """In a fresh process: here, other tests may have imported it."""
    question = "import sys, scheduler; scheduler.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", question], cwd=ROOT).returncode == 0


def test_all_lists_what_is_there():
    assert all(vars(scheduler)[name] for name in scheduler.__all__)
    assert len(set(scheduler.__all__)) == len(scheduler.__all__)


def test_no_public_function_shares_a_modules_name():
    modules = {name.split(".")[1] for name in sys.modules if name.startswith("scheduler.")}
    assert not modules & set(scheduler.__all__)


def test_schedule_errors_are_value_errors():
    assert issubclass(scheduler.ScheduleError, ValueError)


@pytest.mark.parametrize("wrong", ["1f1b", None, 3, Costs()], ids=repr)
@pytest.mark.parametrize("use, wanted", [
    (scheduler.verify, "Schedule or Program"), (scheduler.simulate, "Schedule"), (scheduler.lower, "Schedule"),
    (scheduler.to_csv, "Schedule"), (scheduler.draw, "Schedule or Timeline"), (scheduler.plot, "Schedule or Timeline"),
    (scheduler.chrome_trace, "Timeline"), (scheduler.report, "Timeline"), (scheduler.from_csv, "str"),
    (lambda wrong: simulate(by_name("1f1b", 2, 2), wrong or 3), "Costs"),
])
def test_what_is_of_another_type_is_refused_with_what_makes_a_right_one(use, wanted, wrong):
    wrong = "1f1b" if wanted == "Costs" else 3 if wanted == "str" else wrong
    with pytest.raises(ScheduleError, match=f"is {wrong!r:.5}.*, but must be of type {wanted}. Give .*, for example"):
        use(wrong)


@pytest.mark.parametrize("number", [numpy.int64, numpy.int32, numpy.uint8], ids=lambda kind: kind.__name__)
def test_whole_numbers_of_numpy_are_those_of_python(number):
    name, two = "interleaved", number(2)
    assert str(by_name(name, two, two, stages_per_lane=two)) == str(by_name(name, 2, 2, stages_per_lane=2))
    assert repr(by_name(name, two, two)) == repr(by_name(name, 2, 2))
    assert repr(Placement((number(0), number(1)))) == "Placement(lane_of=(0, 1))"
    order = tuple(scheduler.Action(number(0), kind, number(chunk)) for _, kind, chunk in by_name("1f1b", 1, 2).actions)
    scheduler.verify(scheduler.Schedule("mine", Placement.linear(1), two, (order,)))
    assert scheduler.search(Costs(), two, two, memory=numpy.array([2, 2]), effort=0).value == 7
    assert scheduler.compare(two, two)[0].fits(numpy.array([2, 2]))
    timeline = simulate(by_name("1f1b", 2, 2))
    assert scheduler.report(timeline, balance=[two, two]) == scheduler.report(timeline, balance=numpy.array([2, 2]))


ROOT = scheduler.__path__[0] + "/.."
