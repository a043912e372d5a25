"""The check that `partition` and `scheduler` are this project's: general words, which others use too."""

from importlib.util import find_spec
from pathlib import Path


def check_neighbours() -> None:
    """Look where Python finds the other packages of this distribution.

    Raises:
        ImportError: elsewhere, or nowhere.
    """
    root = Path(__file__).parents[2]
    for name in ("partition", "scheduler"):
        spec, expected = find_spec(name), root / name / "__init__.py"
        origin = None if spec is None else spec.origin or f"a folder without __init__.py, {spec.name}"
        if origin is None or Path(origin).resolve() != expected.resolve():
            raise ImportError(
                f"penstock-torch brings a package {name!r}, at {expected.parent}, but Python finds {origin or 'none'}. "
                "Another distribution or a folder of yours has that name: uninstall it, rename it, or start Python "
                "elsewhere."
            )
