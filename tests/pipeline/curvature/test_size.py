"""Does a product of GPT-2 124M's shape fit where double backward does not?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "curvature_size.py"
NEEDED = 7.0  # GiB: the script's cap, and what else is there


def _free() -> float:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


@pytest.mark.soak
@pytest.mark.skipif(_free() < NEEDED, reason=f"less than {NEEDED:g} GiB of memory are free")
def test_a_product_of_gpt_2_fits_under_a_cap_in_which_double_backward_runs_out_of_memory() -> None:
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False, timeout=1800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pipe, plain = ran.stdout.splitlines()
    assert pipe.startswith("pipe: ") and plain.startswith("plain: out of memory under 6 GiB")
