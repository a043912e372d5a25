"""Optimizer state: the bytes that an optimizer keeps for each parameter, from a factor or from the optimizer itself.

    1.5                          bytes of state for a byte of parameter
    torch.optim.AdamW            a class, or any function from a list of parameters to an optimizer
    AdamW([...], lr=3e-4)        an optimizer: its type, with the settings of its first group

An optimizer is asked by one step on fakes of the parameters (torch's FakeTensor), which takes no memory.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partition.contents import tensors_in, unwrapped
from partition.errors import PartitionError
from scheduler.errors import refuse_unless_finite

OptimizerLike: TypeAlias = float | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def state_bytes(optimizer: OptimizerLike, parameters: Sequence[Tensor]) -> list[int]:
    """The bytes of state for each parameter.

    Args:
        optimizer: as above.
        parameters: with any numbers, or none; their shapes and types count.

    Raises:
        TypeError: it is no optimizer.
        PartitionError: a factor is negative or not finite, or the optimizer takes no such parameters, or cannot step
            without numbers.

    Example:
        >>> state_bytes(torch.optim.Adam, [torch.empty(3, 4)])  # two moments, and a counter of steps
        [100]
    """
    if isinstance(optimizer, Real) and not isinstance(optimizer, bool):
        refuse_unless_finite("optimizer", optimizer, error=PartitionError)
        return [math.ceil(sum(part.nbytes for part in _parts(parameter)) * optimizer) for parameter in parameters]
    kinds = [[(part.shape, part.dtype) for part in _parts(parameter)] for parameter in parameters]
    different = list(dict.fromkeys(chain.from_iterable(kinds)))
    sizes = dict(zip(different, _stepped(optimizer, different)))
    return [sum(sizes[kind] for kind in parts) for parts in kinds]


def _parts(parameter: Tensor) -> list[Tensor]:
    """The tensors that an optimizer steps in this process: of a DTensor what is here, of a quantised weight itself."""
    parts = list(unwrapped(parameter))
    return parts if all(part.dtype is parameter.dtype for part in parts) else [parameter]


def _stepped(optimizer: Any, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[int]:
    """The bytes of state for a parameter of each shape and type, after a step."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(False):
        fakes = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu")) for shape, dtype in kinds]
        for fake in fakes:
            fake.grad = torch.empty_like(fake)
        if not fakes:
            return []
        instance = _instance(optimizer, fakes)
        try:
            with torch.enable_grad():
                instance.step()
        except Exception as error:
            raise PartitionError(
                f"{type(instance).__name__} cannot step without numbers ({type(error).__name__}: {error}), so its "
                "state is not known. Give a factor: bytes of state for a byte of parameter, such as 2 for two moments."
            ) from error
        return [sum(tensor.nbytes for tensor in tensors_in(instance.state.get(fake, {}))) for fake in fakes]


def _instance(optimizer: Any, fakes: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        instance = _made(optimizer, fakes)
    except Exception as error:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise PartitionError(
            f"no {kind.__name__} can be made of parameters like the model's ({type(error).__name__}: {error}), so its "
            "state is not known. Give a function that makes one of those that it takes (lambda params: "
            "Muon([param for param in params if param.dim() == 2])), which counts no state of the others; or a factor: "
            "bytes of state for a byte of parameter, such as 1 for one moment."
        ) from error
    if not isinstance(instance, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a factor, a torch.optim.Optimizer, its class or a function from parameters to one; got "
            f"{optimizer!r}, which makes {type(instance).__name__}."
        )
    return instance


def _made(optimizer: Any, fakes: list[nn.Parameter]) -> Any:
    if isinstance(optimizer, torch.optim.Optimizer):
        names = inspect.signature(type(optimizer)).parameters
        settings: Mapping[str, Any] = {**optimizer.defaults, **optimizer.param_groups[0]}
        arguments = {name: settings[name] for name in names if name in settings and name != "params"}
        return type(optimizer)(fakes, **arguments)
    return optimizer(fakes) if callable(optimizer) else optimizer
