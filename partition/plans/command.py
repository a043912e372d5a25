"""The commands `penstock profile` and `penstock plan`: a model that a script names, in tables or as JSON.

    penstock profile train.py:build --chunks 8                       ──►  Profile on stdout
    penstock plan train.py:build --devices 4 --memory 24GiB          ──►  Plan on stdout
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from typing import Any, TextIO

import click
import torch
from torch import nn

from partition.models.sequential import to_sequential
from partition.plans import planning
from partition.profiles import profiling
from partition.rows import bare
from scheduler.command_line.options import OUTPUT, number, numbers, with_all
from scheduler.command_line.running import CommandError
from scheduler.command_line.targets import value_at
from scheduler.costs import Link

_TARGET = "TARGET"
_OPTIMIZERS: dict[str, Any] = {"sgd": 0, "momentum": 1, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_ABOUT = """TARGET is FILE.py:NAME or MODULE:NAME: a function without arguments, in a script or a module. It returns
(model, sample), or (model, sample, loss_fn, target). The sample is what the model is called with; a model that is no
nn.Sequential is cut by `partition.to_sequential`. The script is imported: put what trains behind
`if __name__ == "__main__"`."""


def _sizes(value: str) -> float | list[float]:
    """A number of bytes such as 24GiB, or a list of them."""
    sizes: list[float] = []
    for text in value.split(","):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS:
            raise click.BadParameter(f"{value!r} is no size such as 24GiB, nor a list such as 24GiB,16GiB.")
        sizes.append(float(match[1]) * _UNITS[match[2].upper()])
    return sizes if len(sizes) > 1 else sizes[0]


def _optimizer(value: str) -> Any:
    """A name, or bytes of state for a byte of parameter."""
    if value in _OPTIMIZERS:
        return _OPTIMIZERS[value]
    try:
        return float(value)
    except ValueError:
        words = f"{value!r} is none of {', '.join(_OPTIMIZERS)}, and no number."
        raise click.BadParameter(words) from None


_of_layers = with_all(  # what both commands take
    click.argument("target", metavar=_TARGET),
    click.option("--device", help="Where to measure; meta: count bytes and FLOPs, run nothing."),
    click.option("--optimizer", type=_optimizer, default="adam", show_default=True, metavar="NAME|FACTOR",
                 help="sgd, momentum, adam, adamw, or bytes of state for a byte of parameter."),
    click.option("--batch-dim", type=int, default=0, show_default=True, metavar="N",
                 help="The dim that counts the rows of the sample."),
    click.option("--timeout", type=float, metavar="SECONDS", help="How long to measure, in all."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--save", "file", type=OUTPUT, metavar="FILE", help="Write JSON to a file as well."),
)  # fmt: skip


@click.command(context_settings={"max_content_width": 120}, short_help="What each layer of a model takes and holds.")
@_of_layers
@click.option("--chunks", type=int, default=1, show_default=True, metavar="N", help="Of the mini-batch.")
def profile(target: str, as_json: bool, file: TextIO | None, **options: Any) -> int:
    """Measures a copy of each layer: F, I, W and B, parameters, gradients, optimizer state, saved activations, output.

    TARGETS

    \b
    examples:
      penstock profile train.py:build --chunks 8
      penstock profile train.py:build --device meta --optimizer sgd --json
    """
    return _answered(profiling.profile, target, options, as_json, file)


@click.command(context_settings={"max_content_width": 120}, short_help="Where to cut, with which schedule.")
@_of_layers
@click.option("--devices", required=True, metavar="N|NAMES", help="How many (ranks), or names: cuda:0,cuda:1.")
@click.option("--memory", type=_sizes, metavar="BYTES", help="That each may hold: 24GiB, or one for each.")
@click.option("--rows", type=int, metavar="N", help="Of the mini-batch to plan for; default: the sample's.")
@click.option("--chunks", type=numbers, metavar="N[,N...]", help="To choose from; default: divisors of the rows.")
@click.option("--schedules", metavar="NAMES", help="To choose from: gpipe,1f1b; default: all.")
@click.option("--speed", type=numbers, metavar="X[,X...]", help="Of each device, relative to the one that is measured.")
@click.option("--latency", type=number, default=0.0, metavar="SECONDS", help="Of a message between devices.")
@click.option("--bandwidth", type=number, metavar="BYTES", help="Of a link, in a second.")
@click.option("--flops", type=number, metavar="X", help="That a device does in a second, with --device meta.")
@click.option("--keep-order", is_flag=True, help="Let the layers go through the devices in the given order.")
@click.option("--effort", type=number, default=0.0, metavar="X", help="Search for a better order than the named ones.")
def plan(
    target: str, as_json: bool, file: TextIO | None, devices: str, schedules: str | None, latency: float,
    bandwidth: float | None, keep_order: bool, **options: Any,
) -> int:  # fmt: skip
    """Chooses balance, chunks, schedule and what to recompute, by simulating what there is to choose from.

    TARGETS

    \b
    examples:
      penstock plan train.py:build --devices 4 --memory 24GiB
      penstock plan train.py:build --devices cuda:0,cuda:1 --memory 24GiB,16GiB --rows 512 --schedules 1f1b,zb-h1
      penstock plan train.py:build --devices 8 --memory 80GB --device meta --flops 4e14 --save plan.json
    """
    options["devices"] = int(devices) if devices.isdecimal() else devices.split(",")
    if keep_order:
        options["reorder"] = False
    if schedules is not None:
        options["schedules"] = schedules.split(",")
    if latency or bandwidth is not None:
        options["link"] = Link(latency, inf if bandwidth is None else bandwidth)
    return _answered(planning.plan, target, options, as_json, file)


for _command in (profile, plan):
    assert _command.help is not None
    _command.help = _command.help.replace("TARGETS", _ABOUT)


def _answered(
    ask: Callable[..., Any], target: str, options: dict[str, Any], as_json: bool, file: TextIO | None
) -> int:
    """Ask of the model that a target names, and print the answer; what is None is as `ask` has it by default."""
    value = value_at(target)
    if not isinstance(value, tuple) or len(value) not in (2, 4) or not isinstance(value[0], nn.Module):
        raise CommandError(
            f"{target} gives a {type(value).__name__}, and not (model, sample), nor (model, sample, loss_fn, target)."
        )
    model, sample, *loss = value
    if loss:
        options["loss_fn"], options["target"] = loss
    layers = model if isinstance(model, nn.Sequential) else to_sequential(model, bare(sample))
    answer = ask(layers, sample, **{name: value for name, value in options.items() if value is not None})
    try:
        if file is not None:
            file.write(answer.to_json())
    finally:  # what took long to measure is said in any case
        print(answer.to_json() if as_json else answer)
    return 0
