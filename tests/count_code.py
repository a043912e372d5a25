"""The size of the three packages: lines of code without docstrings, comments and blank lines, by room and in all.

    python tests/count_code.py

A line counts if any token of code stands on it; so does each line of a text or expression that goes over several.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "scheduler", "partition")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(source: str) -> int:
    """How many lines of a source file are code.

    Example:
        >>> code_lines('def f():\\n    "Docstring."\\n\\n    return [  # two lines\\n        1]')
        3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0]
                lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def lines_by_room() -> Counter[str]:
    """The lines of code of each folder of a package, and of each file that stands beside its folders."""
    counts: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            room = "/".join(path.relative_to(ROOT).parts[:2])
            counts[room] += code_lines(path.read_text())
    return counts


def main() -> None:
    """Print a line for each room, for each package, and for all."""
    rooms = lines_by_room()
    for package in PACKAGES:
        inside = {room: lines for room, lines in rooms.items() if room.startswith(f"{package}/")}
        for room, lines in sorted(inside.items()):
            print(f"{lines:7,}    {room}")
        print(f"{sum(inside.values()):7,}  {package}")
    print(f"{rooms.total():7,}  all")


if __name__ == "__main__":
    main()
