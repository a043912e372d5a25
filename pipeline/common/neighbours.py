"""The check that `partition` and `scheduler` are this project's: general words, which others use too."""

from importlib.util import find_spec
from pathlib import Path


def check_neighbours() -> None:
    """Look where Python finds the other packages of this distribution.

    Raises:
        ImportError: elsewhere, or nowhere.
    """
    here = Path(__file__).parents[2]
    for name in ("partition", "scheduler"):
        spec, expected = find_spec(name), here / name / "__init__.py"
        found = None if spec is None else spec.origin or f"a folder without __init__.py, {spec.name}"
        if found is None or Path(found).resolve() != expected.resolve():
            raise ImportError(
                f"penstock-torch brings a package {name!r}, at {expected.parent}, but Python finds {found or 'none'}. "
                "Another distribution or a folder of yours has that name: uninstall it, rename it, or start Python "
                "elsewhere."
            )
