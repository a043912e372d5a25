"""Pipeline schedules as data: built by name, verified, simulated, drawn.

    by_name ──► Schedule ─┬─► verify      ──►  None, or all that is wrong
                 ▲   │    ├─► simulate    ──►  Timeline ──► makespan, bubble, peak in flight
                 │   ▼    └─► draw        ──►  a grid of lanes and slots
                 text

One relation, `requires`, says what waits for what; all of the above read it. This package imports no torch.

    >>> from scheduler import by_name, draw, verify
    >>> schedule = by_name("1f1b", lanes=4, chunks=4)
    >>> verify(schedule)
    >>> print(draw(schedule))
    lane 0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 == .  B1 == .  B2 == .  B3 ==
    lane 1 |.  F0 F1 F2 .  .  .  .  B0 == F3 B1 == .  B2 == .  B3 == .  .
    lane 2 |.  .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == .  B3 == .  .  .  .
    lane 3 |.  .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == .  .  .  .  .  .
    makespan 21 slots, bubble 42.9%, peak in flight 4 3 2 1
"""

from scheduler.action import Action, Event, Kind
from scheduler.chrome import chrome_trace, timeline_from_chrome
from scheduler.comparison import Row, compare
from scheduler.costs import Costs, Link
from scheduler.csv_files import from_csv, to_csv
from scheduler.dependencies import requires
from scheduler.drawing import draw
from scheduler.errors import ScheduleError
from scheduler.placement import Placement
from scheduler.plotting import plot, svg
from scheduler.programs.lowering import lower
from scheduler.programs.program import Program
from scheduler.reporting import Report, report
from scheduler.schedule import Schedule
from scheduler.schedules import by_name, names
from scheduler.searches.searching import Found, search
from scheduler.simulation import simulate
from scheduler.timeline import Timeline
from scheduler.verification import verify

__all__ = [
    # data
    "Action",
    "Kind",
    "Placement",
    "Program",
    "Schedule",
    "ScheduleError",
    # the relation
    "requires",
    # named schedules
    "by_name",
    "names",
    # what one can do with a schedule
    "verify",
    "simulate",
    "compare",
    "lower",
    "search",
    "report",
    "draw",
    "plot",
    "svg",
    "chrome_trace",
    "timeline_from_chrome",
    "to_csv",
    "from_csv",
    "Costs",
    "Link",
    "Event",
    "Found",
    "Report",
    "Row",
    "Timeline",
]
