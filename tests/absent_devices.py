"""A torch.manual_seed that leaves absent devices alone.

For each kind of device that is not there torch notes the whole stack, to seed it should it come: half a millisecond a
seed, of which the tests set a hundred thousand.
"""

import torch


def leave_absent_devices_unseeded() -> None:
    """From here on, in this process and those that are forked from it."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _do_nothing


def _do_nothing(seed: int) -> None:
    pass
