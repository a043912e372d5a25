"""Balances by measurement: stages that take equally long, or are equally big.

    module, sample ──profiles──► seconds or bytes per layer ──balance_costs──► layers per stage

The names and the order of arguments are torchgpipe's (torchgpipe.balance). What differs: the split is exact, sizes need
no CUDA, and the module keeps its mode, its gradients and its random numbers.
"""

from typing import Any

from torch import nn

from partition.contiguous import balance_costs, check_stages
from partition.errors import PartitionError
from partition.profiles.profiling import layer_bytes, layer_work
from partition.profiles.sandbox import DeviceLike, device_of
from partition.splitting import check_module
from scheduler.errors import refuse_unless_finite, whole_number


def balance_by_time(
    stages: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: DeviceLike = None
) -> list[int]:
    """Choose a balance by the seconds that each layer's forward and backward take.

    Times are as good as the machine is quiet: where two balances must be equal, choose once and write the balance down.

    Args:
        stages: how many stages to cut, from 1 to the number of layers.
        module: the layers in order, run in the mode (train, eval) they are in; it is left as it was.
        sample: what a Pipe takes, best of the size of a chunk: a tensor [batch / chunks, ...] or any pytree.
        timeout: seconds to measure for, in all; at least one pass over the layers is finished.
        device: where to run the layers (default: where the module's parameters are, or the CPU).

    Returns:
        Layers per stage, for Pipe's `balance` or `split`.

    Raises:
        TypeError: `module` is no nn.Sequential.
        PartitionError: `module` has a forward of its own or fewer layers than stages, or `timeout` is negative or not
            finite.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8), nn.Softmax(dim=1))
        >>> balance = balance_by_time(2, model, torch.rand(64, 8), timeout=0.01)
        >>> len(balance), sum(balance)
        (2, 4)
    """
    check_stages(stages, len(check_module(module)))
    refuse_unless_finite("timeout", timeout, error=PartitionError)
    works, _ = layer_work(module, sample, device_of(module, device), timeout)
    return balance_costs([work.total for work in works], stages)


def balance_by_size(
    stages: int,
    module: nn.Sequential,
    sample: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: DeviceLike = None,
) -> list[int]:
    """Choose a balance by the bytes that each layer holds in training.

    A layer counts the activations that its backward needs, of one chunk, and its parameters `param_scale` times: once
    for themselves, once for their gradients (twice for those of half precision, which are summed in float32), and once
    for each tensor of their shape that the optimizer keeps. Of parameters in float32:

        ===========================  ===========  =================================
        optimizer                    param_scale  beside parameter and gradient
        ===========================  ===========  =================================
        SGD                          2            nothing
        SGD with momentum            3            the momentum
        Adagrad                      3            the sum of squares
        Adam, AdamW                  4            the first and second moments
        Adam, AdamW with amsgrad     5            the largest second moment as well
        Adadelta                     4            two running averages
        RMSprop                      3 to 5       squares (momentum, mean gradient)
        ===========================  ===========  =================================

    Args:
        stages: how many stages to cut, from 1 to the number of layers.
        module: the layers in order, run in the mode (train, eval) they are in; it is left as it was.
        sample: a whole mini-batch: a tensor [batch, ...] or any pytree.
        chunks: how many micro-batches Pipe will make of a mini-batch.
        param_scale: bytes held for a parameter in training, over its own bytes; see the table.
        device: where to run the layers (default: where the module's parameters are, or the CPU). "meta" neither
            computes nor allocates, for layers whose forward does not look at values.

    Returns:
        Layers per stage, for Pipe's `balance` or `split`.

    Raises:
        TypeError: `module` is no nn.Sequential.
        PartitionError: `module` has a forward of its own or fewer layers than stages, `chunks` is no whole number of 1
            or more, or `param_scale` is negative or not finite.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance_by_size(2, model, torch.rand(64, 8), chunks=8, param_scale=4.0)
        [3, 2]
    """
    check_stages(stages, len(check_module(module)))
    chunks = whole_number("chunks", chunks, least=1, error=PartitionError)
    refuse_unless_finite("param_scale", param_scale, error=PartitionError)
    sizes, _ = layer_bytes(module, sample, device_of(module, device))
    return balance_costs([size.activations / chunks + size.held * param_scale for size in sizes], stages)
