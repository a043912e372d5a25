"""A pause of Python's garbage collector while millions of actions, which hold no cycles, are made.

    with no_collecting(): ...      a collection looks at every object there is, and there are more with each
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collecting"]


@contextmanager
def no_collecting() -> Iterator[None]:
    """Within, or as a decorator: the collector is off; then it is as it was.

    >>> with no_collecting():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
