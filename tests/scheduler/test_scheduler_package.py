import subprocess
import sys

import scheduler


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


ROOT = scheduler.__path__[0] + "/.."
