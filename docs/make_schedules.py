"""The maker of what a computer can know in docs/schedules.md and docs/glossary.md.

    python docs/make_schedules.py        writes both pages and docs/schedules/*.svg anew

    a page  --markers-->  what is to be made, as words  --MAKERS-->  text between the markers
                                                        --FIGURES-->  docs/schedules/<name>.svg

    <!-- made: grid 1f1b 4 8 -->         a maker, and what it is given
    ...                                  what it made
    <!-- end -->

All else on a page is written by hand. tests/scheduler/test_schedules_page.py compares pages and figures with what is
made now, so none can be out of date.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import matplotlib.style

from scheduler import Costs, Row, by_name, compare, draw, names, plot, simulate, svg

PAGES = [Path(__file__).with_name(name) for name in ("schedules.md", "glossary.md")]
FOLDER = PAGES[0].with_suffix("")

# Qi et al. 2023 (arXiv 2401.10241): its 1.5B model on 8 devices with 64 chunks, in milliseconds
PROFILE = Costs(forward=18.546, input=18.097, weight=9.321, link=0.762)
PROFILED = 8, 64

SIZES = (4, 8), (8, 16), (8, 64)


def remade(page: str) -> str:
    """The page, with everything between markers made anew."""
    return _MARKED.sub(lambda match: f"{match['head']}\n{_made(match['what'])}\n{_END}", page)


def figures(page: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each figure that the page shows."""
    for match in _MARKED.finditer(page):
        maker, *words = match["what"].split()
        if maker == "figure":
            name, lanes, chunks = words
            yield f"{name}.svg", svg(by_name(name, int(lanes), int(chunks)))
        elif maker == "anatomy":
            yield "anatomy.svg", _annotated()


def grid(name: str, lanes: str, chunks: str) -> str:
    """The house grid."""
    return f"```text\n{draw(by_name(name, int(lanes), int(chunks)))}\n```"


def figure(name: str, lanes: str, chunks: str) -> str:
    """A link to the picture."""
    return f"![{name}, {lanes} lanes, {chunks} chunks]({FOLDER.name}/{name}.svg)"


def anatomy() -> str:
    """A link to the picture of the words of a schedule."""
    return f"![1F1B on 4 lanes, with the words for its parts]({FOLDER.name}/anatomy.svg)"


def overview() -> str:
    """Bubbles and peaks of all schedules, where F, I and W of a chunk take the same on a lane."""
    head = ["schedule", "stages a lane", "backward", *(f"{lanes} x {chunks}" for lanes, chunks in SIZES)]
    found = [compare(*size) for size in SIZES]
    rows = [_overview(name, columns) for name, *columns in zip(names(), *found)]
    late = [compare(*size, names=_with_blocks(), release="block") for size in SIZES]
    rows += [_overview(f"{name}, release=\"block\"", columns) for name, *columns in zip(_with_blocks(), *late)]
    return _table(head, sorted(rows, key=lambda row: -float(row[4].split(" / ")[0])))


def memory(lanes: str, chunks: str) -> str:
    """What the first lane holds, which is full whatever is kept, and what the last one does."""
    kept = {"M_W = M_B": 1, "M_W = M_B / 2": 0.5, "M_W = 0": 0}
    split = [name for name in names() if _is_split(name)]
    found = [compare(int(lanes), int(chunks), Costs(kept=share), split) for share in kept.values()]
    rows = [[row[0].name, f"{float(row[0].memory[0]):g}", *(f"{float(each.memory[-1]):g}" for each in row)]
            for row in zip(*found)]
    return _table(["schedule", "first lane", *(f"last lane, {share}" for share in kept)], rows)


def messages() -> str:
    """A step of the profile with messages and without."""
    lanes, chunks = PROFILED
    without = compare(lanes, chunks, replace(PROFILE, link=0))
    rows = [
        [row.name, *(f"{each:.1f}" for each in (free.makespan, row.makespan, row.makespan - free.makespan)),
         f"{row.bubble * 100:.2f}", f"{row.peak_in_flight:g}"]
        for row, free in zip(compare(lanes, chunks, PROFILE), without)
    ]
    head = ["schedule", "step, no messages", "step, with messages", "more", "flush %", "peak"]
    return _table(head, sorted(rows, key=lambda row: float(row[2])))


def warmup() -> str:
    """The same profile, and how many forwards each lane of 1F1B runs ahead."""
    lanes, chunks = PROFILED
    rows = []
    for ahead in range(4):
        depth = [min(lanes - lane + ahead, 2 * (lanes - 1 - lane) + 1) for lane in range(lanes)]
        timeline = simulate(by_name("eager-1f1b", lanes, chunks, warmup=depth), PROFILE)
        rows.append([" ".join(map(str, depth)), f"{timeline.makespan:.1f}", f"{timeline.bubble * 100:.2f}",
                     str(max(timeline.peak_in_flight))])
    return _table(["warm-up of each lane", "step", "flush %", "peak"], rows)


MAKERS: dict[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (grid, figure, anatomy, overview, memory, messages, warmup)
}
_MARKED = re.compile(r"^(?P<head><!-- made: (?P<what>[^\n]*) -->)\n(?:.*?\n)??<!-- end -->$", re.DOTALL | re.MULTILINE)
_END = "<!-- end -->"


def _made(what: str) -> str:
    maker, *words = what.split()
    return MAKERS[maker](*words)


# What stands below the lanes or above them, in slots and lanes: its words, where they stand, what they point to.
_NOTES = [
    ("1F2: forward of\nchunk 2 on stage 1", (3.5, 1.7), (4.2, 4.8)),
    ("3B0: backward of chunk 0\non stage 3, two slots", (5, 3.7), (9.6, 4.8)),
    ("a slot", (12.5, 3.9), (14.5, 4.6)),
    ("a bubble: the lane is idle", (24.5, 2.5), (20.5, 4.6)),
]
_PHASES = [("warm-up of lane 0", 0, 4), ("steady", 10, 16), ("cooldown", 16, 27)]


def _annotated() -> str:
    text, line = StringIO(), {"color": "#444444", "shrinkA": 0, "shrinkB": 0}
    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": "penstock"}]):
        picture = plot(by_name("1f1b", 4, 6), title="", memory=False)
        (lanes,) = picture.axes
        lanes.xaxis.set_visible(False)
        lanes.get_legend().remove()
        picture.supxlabel("")  # without makespan and bubbles
        for words, target, place in _NOTES:
            arrow = {**line, "arrowstyle": "-"}
            lanes.annotate(words, target, place, ha="center", va="center", annotation_clip=False, arrowprops=arrow)
        for words, left, right in _PHASES:
            arrow = {**line, "arrowstyle": "<->"}
            lanes.annotate("", (left, -0.3), (right, -0.3), annotation_clip=False, arrowprops=arrow)
            lanes.text((left + right) / 2, -0.55, words, ha="center")
        picture.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _overview(name: str, columns: Iterable[Row]) -> list[str]:
    first, *_ = columns = tuple(columns)
    backward = "split" if _is_split(first.name) else "whole"
    return [name, str(first.stages_per_lane), backward, *map(_rates, columns)]


def _rates(row: Row) -> str:
    if row.reason:
        return "-"
    return f"{row.bubble * 100:.2f} / {abs(row.span_bubble) * 100:.2f} / {row.peak_in_flight:g}"


def _is_split(name: str) -> bool:
    return bool(by_name(name, *SIZES[0]).split)


def _with_blocks() -> tuple[str, ...]:
    return tuple(name for name in names() if by_name(name, *SIZES[0]).blocks)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in PAGES:
        page = path.read_text()
        path.write_text(remade(page))
        for name, text in figures(page):
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
