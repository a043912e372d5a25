"""Lightning trains a Pipe on simulated accelerators with the strategy of docs/integrations.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "integrations"))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("by_hand", [False, True])
def test_lightning_leaves_a_pipe_where_it_is(by_hand: bool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from classifier import Classifier, Settled, fitted
    from test_loops import data, piped, tied

    class There(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor | None:
            inputs, target = batch
            return super().training_step((inputs, target.to("sim:1")), index)

    plain, pipe = Classifier(tied()), There(piped(devices=["sim:0", "sim:1"]), by_hand)
    expected = fitted(plain, data(), tmp_path).callback_metrics
    pipe.accuracy.to("sim:1")
    found = fitted(pipe, data(), tmp_path, strategy=Settled(device=torch.device("cpu"))).callback_metrics
    for ours, theirs in zip(pipe.net.parameters(), plain.net.parameters(), strict=True):
        assert ours.device.type == "sim"
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-11)
    torch.testing.assert_close(found["loss"].cpu(), expected["loss"])
