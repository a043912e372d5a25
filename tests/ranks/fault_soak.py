"""Many faults, one after the other: does every rank learn of each, soon, and is nothing left?

    python tests/ranks/fault_soak.py --count 200 --seed 1  -->  a table: kind, how many, slowest and middle, failures

Every second fault ends its run, the rest come in runs of eight. Each fault follows from the seed.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
from fault_cases import ENDINGS, Case, ending, going_on  # noqa: E402
from fault_launcher import Launcher  # noqa: E402
from fault_verdicts import Verdict, judged, told  # noqa: E402

IN_A_ROW = 8


def cases(count: int, seed: int) -> Iterator[Case]:
    """Runs with so many faults together."""
    random = Random(seed)
    kinds = cycle(ENDINGS)
    while count > 0:
        size = random.choice((2, 2, 3, 4))
        if random.random() < 1 / (1 + IN_A_ROW):
            found = going_on(random, size, min(count, IN_A_ROW))
            count -= min(count, IN_A_ROW)
        else:
            found = ending(random, next(kinds), size)
            count -= 1
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description="inject faults into ranks and see what comes of them")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="tell every run, not only those that failed")
    options = parser.parse_args()
    begun = time.monotonic()
    verdicts: list[Verdict] = []
    with Launcher() as launcher:
        for number, case in enumerate(cases(options.count, options.seed)):
            ran = launcher.run(case.size, case.job(), case.seconds, case.resume_after)
            new = judged(case, ran)
            verdicts += new
            failed = [verdict for verdict in new if verdict.wrong]
            for verdict in failed:
                print(f"run {number}: {verdict.kind}: {verdict.what}", *verdict.wrong, sep="\n  ", file=sys.stderr)
            if failed or options.verbose:
                print(told(case, ran), file=sys.stderr)
    seconds = time.monotonic() - begun
    print(table(verdicts))
    print()
    print(
        f"{len(verdicts)} faults on 2 to 4 ranks in {seconds:.0f} s, seed {options.seed}: {date.today()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}."
    )
    return int(any(verdict.wrong for verdict in verdicts))


def table(verdicts: list[Verdict]) -> str:
    """In Markdown, a line for each kind."""
    lines = ["| a rank ... | faults | median s | slowest s | failures |", "| --- | ---: | ---: | ---: | ---: |"]
    for kind in sorted({verdict.kind for verdict in verdicts}):
        found = [verdict for verdict in verdicts if verdict.kind == kind]
        times = [verdict.seconds for verdict in found]
        failures = sum(bool(verdict.wrong) for verdict in found)
        lines.append(f"| {kind} | {len(found)} | {median(times):.2f} | {max(times):.2f} | {failures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
