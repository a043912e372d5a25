"""Jobs for ranks with a simulated accelerator each, whose payloads go from device to device: scripts of tests/ranks.

    job("rank_transparency:compare_all", configs)     what it returns, if nothing raced; and how many payloads came
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

import rank_payloads
import torch
from carrier import Simulated


def carried(**how: Any) -> AbstractContextManager[list[Simulated]]:
    """Within: the Pipe finds a carrier."""
    return rank_payloads.carried_by(lambda device: Simulated(device, **how))


def job(function: str, *args: Any) -> tuple[Any, int]:
    """(what a script's function returns, how many payloads came to this rank)"""
    module, _, name = function.partition(":")
    with carried() as carriers:
        result = getattr(importlib.import_module(module), name)(*args)
        torch.accelerator.synchronize()
        torch.sim.check()
    return result, sum(len(carrier.received) for carrier in carriers)


def failing(first: bool) -> tuple[str, float, list[str]]:
    """A failure of one rank, with payloads from device to device."""
    return rank_payloads.failing(first, carried)


def in_one_order() -> str:
    """What this rank hears where all its transfers have one order, and each way of two ranks waits for the other."""
    with carried(in_one=True, seconds=1.0):
        pipe = rank_payloads.over_ranks(rank_payloads.layered(8), rank_payloads.even(8, 2), 4, schedule="1f1b")
        try:
            pipe.step(rank_payloads.rows(8), rank_payloads.rows(8), loss_fn=rank_payloads.square)
        except RuntimeError as error:
            return str(error)
    return "nothing"
