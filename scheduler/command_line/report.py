"""The command `penstock report`: traced steps from files, measured beside planned, and what to change.

    FILE...  --timeline_from_chrome-->  timelines --report-->  a table, or JSON, on stdout
"""

from typing import Any, TextIO

import click

from scheduler.chrome import timeline_from_chrome
from scheduler.command_line.options import INPUT, numbers
from scheduler.command_line.running import CommandError
from scheduler.errors import ScheduleError
from scheduler.reporting import report as reported
from scheduler.timeline import Timeline


@click.command(context_settings={"max_content_width": 120}, short_help="Traced steps: the bottleneck, what to change.")
@click.argument("files", type=INPUT, nargs=-1, required=True, metavar="FILE...")
@click.option("--balance", type=numbers, metavar="N,N,...", help="Layers of each stage: moves of layers are tried too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(files: tuple[TextIO, ...], balance: Any, as_json: bool) -> int:
    """Reports on traced steps: for each stage how long it worked, waited and was idle, and what would shorten the step.

    Each FILE is the trace of one step, as scheduler.chrome_trace writes it; of several, medians are taken. In Python:
    Path("step.json").write_text(chrome_trace(pipe.step(x, y, loss_fn=f, trace=True).timeline)).

    \b
    busy     how long the stage's actions ran
    planned  how long they would, each as long as those of its stage and kind are on average
    waiting  how long its lane waited, between two actions, for the next to have what it needs
    idle     of its lane: before its first action and after its last

    \b
    examples:
      penstock report step5.json step6.json step7.json
      penstock report step.json --balance 2,2,4 --json
    """
    layers = None if balance is None else balance if isinstance(balance, tuple) else (balance,)
    result = reported([_read(file) for file in files], balance=layers)
    print(result.to_json() if as_json else result)
    return 0


def _read(file: TextIO) -> Timeline:
    try:
        return timeline_from_chrome(file.read())
    except ScheduleError as error:
        raise CommandError(f"cannot read {file.name}: {error}") from None
