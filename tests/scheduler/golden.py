"""Writes the golden programs anew: python tests/scheduler/golden.py. Look at the difference before you commit it."""

from pathlib import Path

from scheduler import by_name, lower, names

FOLDER = Path(__file__).parents[1] / "golden"
SIZES = {"dualpipev": (2, 4), "zb-h2": (2, 4)}  # they need twice as many chunks as lanes


def golden(name):
    """The text of the file of this schedule."""
    lanes, chunks = SIZES.get(name, (3, 4))
    return f"{lower(by_name(name, lanes, chunks))}\n"


if __name__ == "__main__":
    for each in names():
        (FOLDER / f"{each}.txt").write_text(golden(each))
