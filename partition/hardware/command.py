"""The command `penstock devices`: the GPUs of this host in tables, and those to take for a pipeline.

    penstock devices [--choose N] [--margin X] [--json]  ──►  devices(), Devices.best  ──►  tables, or JSON, on stdout
"""

from __future__ import annotations

import json
import sys

import click

from partition.hardware.gpus import gib
from partition.hardware.inventory import devices as find
from partition.hardware.selection import MARGIN, Choice, memory_cap
from scheduler.command_line.running import CommandError


@click.command(context_settings={"max_content_width": 120}, short_help="GPUs: memory, users, power, links.")
@click.option("--choose", "count", type=int, metavar="N", help="Choose N for a pipeline, in the order of its stages.")
@click.option("--margin", type=float, default=MARGIN, show_default=True, metavar="X",
              help="The share of the free memory to keep back from a plan.")
@click.option("--env", "as_variable", is_flag=True, help="With --choose: print the variable that shows a process these "
              "devices in this order, and nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def devices(count: int | None, margin: float, as_variable: bool, as_json: bool) -> int:
    """Shows the GPUs of this host, as NVIDIA's management library (NVML) tells of them, and how they are joined.

    cuda:0 is CUDA's number in a process with the variables of this one: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER
    decide it. The others of the host are hidden.

    \b
    free          bytes that no process holds
    utilised      the share of the last second or less in which a kernel ran
    power, limit  what it draws, and what the driver holds it to
    NV4, PIX ...  the way between two devices, as nvidia-smi topo -m calls it

    \b
    examples:
      penstock devices
      penstock devices --choose 4
      env $(penstock devices --choose 4 --env) torchrun --nproc-per-node 4 train.py
      CUDA_VISIBLE_DEVICES=4,5,6,7 penstock devices --choose 2 --json
    """
    if as_variable and (count is None or as_json):
        raise CommandError("--env prints a choice, without JSON: add --choose N, drop --json.")
    inventory = find()
    choice = None if count is None else inventory.best(count)
    chosen = () if choice is None else choice.devices
    caps = [None if device.free_bytes is None else memory_cap(device, margin) for device in chosen]
    if as_variable and choice is not None:
        print(_assigned(choice))
        for warning in choice.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return 0
    if as_json:
        print(json.dumps(inventory.to_json() | ({} if choice is None else {"choice": _plain(choice, caps)}), indent=2))
        return 0
    print(inventory)
    if choice is not None:
        _show_choice(choice, caps, margin)
    return 0


def _show_choice(choice: Choice, caps: list[int | None], margin: float) -> None:
    print(f"\n{choice}")
    sizes = ", ".join("not told" if cap is None else gib(cap) for cap in caps)
    print(f"memory for a plan: {sizes}; {margin:.0%} of what is free is kept back")
    print(_assigned(choice))


def _assigned(choice: Choice) -> str:
    return " ".join(f"{name}={value}" for name, value in choice.environment.items())


def _plain(choice: Choice, caps: list[int | None]) -> dict[str, object]:
    return {
        "devices": [device.label for device in choice.devices],
        "links": [str(link) for link in choice.links],
        "caps": caps,
        "environment": choice.environment,
        "warnings": list(choice.warnings),
        "is_exact": choice.is_exact,
    }
