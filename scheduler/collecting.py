"""A pause of Python's garbage collector while many objects are made that hold no cycles.

    with no_collecting(): ...      a collection looks at every object there is, and there are more with each
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collecting() -> Iterator[None]:
    """Within, or as a decorator: the collector is off; then it is as it was.

    >>> with no_collecting():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    if was_on:  # else another thread may have paused it, and go on in between
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
