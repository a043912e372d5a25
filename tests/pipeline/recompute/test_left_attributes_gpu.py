"""The law of test_left_attributes.py on a GPU, where hooks of the backward run in autograd's own thread.

make test-gpu
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_left_attributes import CHUNKS, LAYERS, KeepsByHooks, KeepsInPlace, assert_same_gradients, model_of
from torch import nn

from pipeline import Pipe
from pipeline.common.places import Place

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
PLACES: dict[str, list[Any]] = {
    "one": [GPU, GPU], "named": [Place(GPU, "0"), Place(GPU, "1")], "host first": ["cpu", GPU],
}  # fmt: skip


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("how", ["step", "forward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_backward_finds_what_its_forward_left_on_a_gpu(
    layer: type[nn.Module], checkpoint: str, place: str, how: str, workers: str
) -> None:
    if layer is KeepsInPlace and checkpoint != "never":
        pytest.skip("a recomputation that writes an attribute in place is refused")
    if place == "one" and workers == "threads":
        pytest.skip("stages of one place have one thread")
    plain = model_of(layer)
    model = copy.deepcopy(plain) if layer is not KeepsByHooks else model_of(layer)
    pipe = Pipe(model, [2, 3], CHUNKS, devices=PLACES[place], checkpoint=checkpoint, workers=workers)
    for turn in range(5):
        assert_same_gradients(pipe, plain, how, turn, rtol=1e-10, atol=1e-12)
