"""A module of Lightning around a network, and its fit: imported by the tests that need it, since that takes seconds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False,
         "enable_checkpointing": False}  # fmt: skip


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module, by_hand: bool = False) -> None:
        super().__init__()
        self.net = net
        self.automatic_optimization = not by_hand
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        inputs, target = batch
        if self.automatic_optimization:
            output = self.net(inputs)
            loss = F.cross_entropy(output, target)
        else:
            optimizer = self.optimizers()
            step = self.net.step(inputs, target, loss_fn=F.cross_entropy, outputs=True)
            loss, output = step.loss, step.outputs
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        self.accuracy(output, target)
        self.log("accuracy", self.accuracy)
        self.log("loss", loss.detach())
        return loss if self.automatic_optimization else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Settled(SingleDeviceStrategy):
    """It leaves the model where it is, which Lightning moves to a device, and to the host at the end."""

    def model_to_device(self) -> None:
        pass

    def teardown(self) -> None:
        model, self._lightning_module = self._lightning_module, None
        super().teardown()
        self._lightning_module = model


def fitted(module: Classifier, data: Dataset[Any], folder: Path, **settings: Any) -> lightning.Trainer:
    if module.automatic_optimization:
        settings["gradient_clip_val"] = 0.5
    settings = {"accelerator": "cpu", **settings}
    trainer = lightning.Trainer(max_epochs=2, default_root_dir=folder, **QUIET, **settings)
    trainer.fit(module, DataLoader(data, batch_size=7))
    return trainer
