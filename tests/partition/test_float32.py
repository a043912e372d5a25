"""Within float32_in_full() no float32 is rounded to fewer bits; afterwards torch's switches are as they were."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from partition.precision import OPERATIONS, float32_in_full, precision_switch

SWITCHES = {
    (backend, operation): precision_switch(backend, operation)
    for backend, operations in {"generic": ["all"], "cuda": ["all", "matmul", "conv", "rnn"],
                                "mkldnn": ["all", "matmul", "conv", "rnn"]}.items()
    for operation in operations
}  # fmt: skip


def precisions() -> dict[tuple[str, str], str]:
    return {name: switch.read() for name, switch in SWITCHES.items()}


@pytest.fixture(autouse=True)
def switches_put_back() -> Iterator[None]:
    before = precisions()
    yield
    for name, switch in SWITCHES.items():
        switch.write("none")
        if switch.read() != before[name]:
            switch.write(before[name])
    assert precisions() == before


SET = [name for name in SWITCHES if name[0] != "generic"]


@pytest.mark.parametrize(("name", "value"), [*product(SET, ["tf32", "ieee"]), (("generic", "all"), "tf32")])
def test_all_switches_say_so_within_and_are_as_they_were_afterwards(name: tuple[str, str], value: str) -> None:
    SWITCHES[name].write(value)
    before = precisions()
    assert value in before.values()
    with pytest.raises(KeyError), float32_in_full():
        assert {switch.read() for switch in OPERATIONS} <= {"none", "ieee"}
        raise KeyError
    assert precisions() == before


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_torchs_own_setting_reads_as_before(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with float32_in_full():
            assert SWITCHES["cuda", "matmul"].read() in ("none", "ieee")
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
