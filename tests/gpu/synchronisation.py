"""Whether the host waits for a GPU: `with no_synchronisation(): ...` raises where it would."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Within: where the host would wait for a GPU, torch raises."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
