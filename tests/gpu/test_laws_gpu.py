"""The laws of a Pipe on a GPU: the numbers of the plain module there, at every place, driver and stream.

    make test-gpu

As on the simulated accelerator (tests/accelerator/test_pipe.py), whose kernels are the host's: there to the bit, here
to rounding. All is float64, and draws from the GPU's own generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import law_check
import pytest
import torch
from cover import pairwise
from device_programs import PROGRAMS, name_of, on_host
from law_check import AXES, Result, differences, expect, observe
from law_models import MODELS
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.common.places import Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),  # of torch's reentrant checkpoint
]

GPU = "cuda:0"
ON_THE_HOST = {"private_generator", "closure"}  # these compute with tensors of the host wherever they stand
PLACEMENTS: dict[str, Callable[[int], list[Any]]] = {
    "one": lambda stages: [GPU] * stages,
    "named": lambda stages: [Place(torch.device(GPU), str(stage)) for stage in range(stages)],
    "named in pairs": lambda stages: [Place(torch.device(GPU), str(stage // 2)) for stage in range(stages)],
    "all GPUs": lambda stages: [f"cuda:{stage % torch.cuda.device_count()}" for stage in range(stages)],
}
WORKERS = (None, "inline", "threads")


@contextmanager
def side_streams() -> Iterator[None]:
    """Within: on each GPU another stream than the default one is current, for which no other waits."""
    found = [torch.cuda.Stream(index) for index in range(torch.cuda.device_count())]
    before = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
    for stream in found:
        torch.cuda.set_stream(stream)
    torch.cuda.set_device(0)
    try:
        yield
    finally:
        for stream in before:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(0)
        torch.cuda.synchronize()


STREAMS: dict[str, Callable[[], AbstractContextManager[None]]] = {"default": nullcontext, "others": side_streams}
LAWS: dict[str, Sequence[Any]] = {
    **AXES,
    "model": [model for model in MODELS if model not in ON_THE_HOST],
    "drive": tuple(PLACEMENTS),
    "workers": WORKERS,
    "streams": tuple(STREAMS),
}


def near(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.dtype is other.dtype and one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", pairwise(LAWS), ids=name_of)
def test_a_pipe_gives_what_the_plain_module_gives(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(stages: int) -> dict[str, Any]:
        return {"devices": PLACEMENTS[config["drive"]](stages), "workers": config["workers"]}

    monkeypatch.setitem(law_check.DRIVES, config["drive"], placed)
    with STREAMS[config["streams"]]():
        found = Result(**on_host(vars(observe(config))))
    assert not differences(found, Result(**on_host(vars(expect(config, device=GPU)))), near)


@pytest.mark.parametrize(
    "case",
    pairwise({"program": tuple(PROGRAMS), "place": tuple(PLACEMENTS), "workers": WORKERS, "streams": tuple(STREAMS)}),
    ids=name_of,
)
def test_a_program_gives_the_same_wherever_its_stages_stand(case: dict[str, Any]) -> None:
    """As on one GPU in one thread, where each value is handed over as it is."""
    program = PROGRAMS[case["program"]]

    def made(
        place: Callable[[int], list[Any]], workers: str | None, model: nn.Sequential, balance: list[int], chunks: int,
        **settings: Any,
    ) -> Pipe:
        return Pipe(model, balance, chunks, devices=place(len(balance)), workers=workers, **settings)

    torch.manual_seed(7)
    with STREAMS[case["streams"]]():
        found = on_host(program(partial(made, PLACEMENTS[case["place"]], case["workers"])))
    torch.manual_seed(7)
    expected = on_host(program(partial(made, PLACEMENTS["one"], "inline")))
    assert [near(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)
