"""How much does the search find, how close is that to the best there can be, and how long does it take?

    python benchmarks/search.py              unequal stages, the published table, a vee, a large one
    python benchmarks/search.py --quick      fewer of each, less effort

Unequal stages: the 6.2B profile of Qi et al. 2023 (arXiv 2401.10241), each time of each stage drawn up to 20 % longer
or shorter, memory for as many chunks as lanes. "saved" is against the best named schedule that fits, on the same
lanes; "gap" is to the lower bound; "proven" counts where there is none. Uniform stages: the papers' bubble (span) rates
and what is found for the same profiles and memory. The numbers are counted, not measured, but for the seconds.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import mean

from scheduler import Costs, Placement
from scheduler.searches.searching import Found, search

TIMES, LINK, KEPT = (29.718, 29.444, 19.927), 0.527, 0.43

# lanes, chunks, F, I, W, link, hidden size, heads: the papers' rates for memory of one and of two chunks a lane
TABLE = [
    (8, 24, 18.522, 18.086, 9.337, .601, 2304, 24, .1585, .0433),
    (8, 32, 18.513, 18.086, 9.331, .626, 2304, 24, .1242, .0039),
    (8, 64, 18.546, 18.097, 9.321, .762, 2304, 24, .0674, .0026),
    (8, 24, 29.718, 29.444, 19.927, .527, 4096, 32, .1323, .0029),
    (8, 32, 29.802, 29.428, 19.530, .577, 4096, 32, .1045, .0022),
    (8, 64, 29.935, 29.621, 19.388, .535, 4096, 32, .0554, .0010),
    (16, 48, 11.347, 11.248, 8.132, .377, 5120, 40, .1397, .0066),
    (16, 64, 11.307, 11.254, 8.101, .379, 5120, 40, .1088, .0054),
    (16, 128, 11.325, 11.308, 8.109, .378, 5120, 40, .0576, .0028),
    (32, 96, 10.419, 10.207, 7.715, .408, 6144, 48, .1421, .0038),
    (32, 128, 10.408, 10.204, 7.703, .408, 6144, 48, .1106, .0029),
    (32, 256, 10.402, 10.248, 7.698, .460, 6144, 48, .0594, .0018),
]


def unequal(seed: int, lanes: int) -> Costs:
    """Times of stages that are alike, but for 20 %."""
    rnd = random.Random(seed)
    forward, backward, weight = ([time * rnd.uniform(0.8, 1.2) for _ in range(lanes)] for time in TIMES)
    return Costs(forward, backward, weight, link=LINK, kept=KEPT)


def timed(*args: object, **kwargs: object) -> tuple[Found, float]:
    begin = time.perf_counter()
    found = search(*args, **kwargs)  # type: ignore[arg-type]
    return found, time.perf_counter() - begin


def report_unequal(lanes: int, chunks: int, count: int, effort: float) -> None:
    for objective in ("flush", "span"):
        runs = [timed(unequal(seed, lanes), lanes, chunks, lanes, objective, effort=effort) for seed in range(count)]
        founds, seconds = zip(*runs)
        gains = [found.gain for found in founds]
        print(f"| {objective} | {lanes} x {chunks} | {count} | {mean(gains):.2%} | {min(gains):.2%} | {max(gains):.2%} "
              f"| {mean(found.gap for found in founds):.2%} | {sum(found.gap < 1e-8 for found in founds)} "
              f"| {mean(seconds):.1f} | {max(seconds):.1f} |", flush=True)


def report_table(rows: int, effort: float) -> None:
    for lanes, chunks, forward, backward, weight, link, hidden, heads, one, two in TABLE[:rows]:
        kept = 32 * hidden / (34 * hidden + 5 * heads * 1024)
        costs = Costs(forward, backward, weight, link=link, kept=kept)
        for share, published in ((1, one), (2, two)):
            found, seconds = timed(costs, lanes, chunks, share * lanes, "span", effort=effort)
            work = chunks * (forward + backward + weight)
            print(f"| {lanes} x {chunks} | {share} p | {published:.4f} | {1 - work / found.value:.4f} "
                  f"| {1 - work / found.bound:.4f} | {found.schedule.name} | {seconds:.1f} |", flush=True)


def report_vee(effort: float) -> None:
    for lanes, chunks in ((4, 4), (8, 8), (8, 12), (16, 16)):
        found, seconds = timed(
            Costs(), lanes, chunks, 2 * lanes, "flush", placement=Placement.vee(lanes), effort=effort)
        print(f"| {lanes} x {chunks} | {found.timeline.bubble:.4f} | {found.gap:.2%} | {found.schedule.name} "
              f"| {seconds:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the search finds, and how close to the best that is.")
    parser.add_argument("--quick", action="store_true", help="fewer of each, less effort")
    quick = parser.parse_args().quick
    effort = 0.03 if quick else 1
    print("Unequal stages, memory for as many chunks as lanes\n")
    print("| objective | lanes x chunks | instances | mean saved | least | most | mean gap | proven | mean s | most |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    report_unequal(4, 12, 20, effort)
    report_unequal(8, 64, 1 if quick else 4, effort)
    print("\nUniform stages, span bubble\n")
    print("| lanes x chunks | memory | published | found | no less than | schedule | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    report_table(6 if quick else len(TABLE), effort)
    print("\nTwo stages a lane (vee), equal times, flush bubble, memory of p chunks\n")
    print("| lanes x chunks | bubble | gap | schedule | s |")
    print("| --- | --- | --- | --- | --- |")
    report_vee(effort)


if __name__ == "__main__":
    main()
