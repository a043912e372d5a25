"""The placement of parameters that stages on several devices read: an owner's device, and copies on the others.

    owner of p = the place of the first stage that reads it     bring: a copy elsewhere, for the length of a call
                                                                to_owners: gradients computed there, back

Copies kept between calls would save their transfer, but each write of the parameter would have to reach all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.common.places import Place
from pipeline.execution.communicator import Pair
from pipeline.transports.local import Local


class ParameterPlacement:
    """The owning places of the parameters of one call.

    Args:
        stages: the layers of each stage.
        places: the place of each stage.
        transport: moves tensors between places.
    """

    def __init__(self, stages: Sequence[Sequence[nn.Module]], places: Sequence[Place], transport: Local) -> None:
        self._transport = transport
        self._owning_places: dict[int, Place] = {}  # by id
        if len(set(places)) > 1:
            for layers, place in zip(stages, places, strict=True):
                for layer in layers:
                    for parameter in layer.parameters():
                        owner = self._owning_places.setdefault(id(parameter), place)
                        if owner.device != parameter.device == place.device:  # tied after the Pipe was built
                            self._owning_places[id(parameter)] = place

    def bring(self, place: Place, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parameters as a place has them: themselves, or copies where another place owns them."""
        if not self._owning_places:
            return parameters
        owned = [(self._owning_places.get(id(parameter), place), parameter) for parameter in parameters]
        with torch.inference_mode(False):  # a copy has a version counter, in every mode
            return [
                parameter if owner == place else self._transport.carry(parameter.detach(), owner, place)
                for owner, parameter in owned
            ]

    def to_owners(self, pairs: list[Pair], place: Place) -> list[Pair]:
        """(Parameter, gradient) that were computed at a place, with the gradients where the parameters are owned."""
        if not self._owning_places:
            return pairs
        return [
            (owner, self._transport.carry(grad, place, self._owning_places.get(id(owner), place)))
            for owner, grad in pairs
        ]
