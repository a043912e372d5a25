"""The placement of parameters that stages on several devices read: an owner's device, and copies on the others.

    home of p = the place of the first stage that reads it      bring: a copy elsewhere, for the length of a call
                                                                carried_home: what is computed there, back
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.common.places import Place
from pipeline.transports.local import Local


class ParameterPlacement:
    """The homes of the parameters of one call.

    Args:
        stages: the layers of each stage.
        places: where each stage computes.
        transport: moves tensors between places.
    """

    def __init__(self, stages: Sequence[Sequence[nn.Module]], places: Sequence[Place], transport: Local) -> None:
        self._transport = transport
        self._of: dict[int, Place] = {}  # by id
        if len(set(places)) > 1:
            for layers, place in zip(stages, places, strict=True):
                for layer in layers:
                    for parameter in layer.parameters():
                        home = self._of.setdefault(id(parameter), place)
                        if home.device != parameter.device == place.device:  # tied after the Pipe was built: it is here
                            self._of[id(parameter)] = place

    def bring(self, place: Place, parameter: Tensor) -> Tensor:
        """The values of a parameter at a place: itself, or a copy where it lives elsewhere."""
        home = self._of.get(id(parameter), place)
        if home == place:
            return parameter
        with torch.inference_mode(False):  # so that a copy counts how often it is written, in every mode
            return self._transport.carry(parameter.detach(), home, place)

    def carried_home(self, owner: Tensor, grad: Tensor, place: Place) -> Tensor:
        """What was computed for a parameter at a place, where the parameter lives."""
        return self._transport.carry(grad, place, self._of.get(id(owner), place))
