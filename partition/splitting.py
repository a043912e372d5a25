"""The cut of an nn.Sequential into stages by a balance.

    nn.Sequential  0 1 2 3 4        balance [3, 2]
                   └─┬─┘ └┬┘
    stages         0 1 2 | 3 4      the same layers under the same names, in one nn.Sequential per stage

Validation is here: a balance that passes it is positive ints that sum to the number of layers.
"""

from collections.abc import Iterable
from itertools import islice

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from partition.contiguous import balance_costs
from partition.errors import PartitionError
from partition.names import ModelLayers, sequential
from scheduler.errors import whole


def split(module: nn.Sequential, balance: Iterable[int]) -> list[nn.Sequential]:
    """Cut a sequential module into contiguous stages.

    Args:
        module: the layers in order; neither it nor they are changed.
        balance: layers per stage.

    Returns:
        One nn.Sequential per stage, in `module`'s training mode. The layers are the objects of `module` and keep their
        names, so that the names of parameters over all the stages are those of the module.

    Raises:
        TypeError: `module` is no nn.Sequential, or `balance` no iterable.
        PartitionError: `module` has a forward of its own or no layers, or `balance` does not fit it.

    Example:
        >>> head, tail = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), [2, 1])
        >>> list(dict(tail.named_parameters()))
        ['2.weight', '2.bias']
    """
    check_module(module)
    # Not named_children(), which leaves out the second place of a layer that stands in two.
    layers = iter(module._modules.items())
    return [_stage(module, islice(layers, length)) for length in check_balance(balance, len(module))]


def runs_in_order(module: object) -> bool:
    """Whether a module is an nn.Sequential whose forward is its layers one after the other."""
    return isinstance(module, nn.Sequential) and not _own(module)


def _own(module: nn.Sequential) -> list[str]:
    """The methods that decide how a sequential module runs, where they are not torch's or ours, by name."""
    names = ["forward", "__call__", "__iter__"]
    of = ModelLayers if isinstance(module, ModelLayers) else nn.Sequential
    own = [name for name in names if getattr(type(module), name) is not getattr(of, name)]
    return own or [name for name in names[:1] if name in vars(module)]


def check_module(module: object) -> nn.Sequential:
    """`module` itself, if its forward is its layers one after the other; TypeError or PartitionError where not."""
    kind = type(module).__name__
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be an nn.Sequential, the layers in order; got {kind}. "
            f"Write the model as nn.Sequential(layer, layer, ...); or, if it has blocks that follow each other, "
            f"partition.to_sequential(model, x), where x is what it is called with. Pipe(model, sample=x) does that."
        )
    if not runs_in_order(module):
        raise PartitionError(
            f"{kind} is an nn.Sequential with its own {_own(module)[0]}, which no stage would run. Move what it "
            "does into layers, or cut it as other models are, Pipe(module, sample=...); if it only runs them in order, "
            "pass nn.Sequential(*module)."
        )
    if not len(module):
        raise PartitionError(f"module has no layers ({kind}()), and a stage needs one. Give it one layer or more.")
    return module


def check_shaped(model: nn.Module) -> None:
    """Raise PartitionError if modules are lazy still: these get their shapes and their class from their first input."""
    names = [
        name or type(module).__name__ for name, module in model.named_modules()
        if isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook")
    ]  # fmt: skip
    if names:
        raise PartitionError(
            f"lazy modules have not run yet: {', '.join(names[:5])}. Call the model with a batch first."
        )


def check_balance(balance: Iterable[int], layers: int) -> list[int]:
    """The balance as a list of ints; all that is wrong with it in one error.

    Args:
        balance: layers per stage; ints of Python or numpy, or 0-d tensors of ints.
        layers: how many layers the module has, 1 or more.

    Raises:
        TypeError: `balance` is no iterable.
        PartitionError: it is empty, an entry is no int or below 1, or the sum is not `layers`.

    Example:
        >>> check_balance((3, 1), layers=4)
        [3, 1]
    """
    try:
        entries: list[object] = list(balance)
    except TypeError:
        raise TypeError(
            f"balance must be the layers of each stage, as a list; got {balance!r}. "
            f"{_remedy(whole(balance) or 1, layers)}"
        ) from None
    counts = [whole(count) for count in entries]
    faults = [f"balance[{s}] is {entries[s]!r}, not an int" for s, count in enumerate(counts) if count is None]
    lengths = [count for count in counts if count is not None]
    faults += [f"balance[{s}] is {count}, below 1" for s, count in enumerate(counts) if count is not None and count < 1]
    if not entries:
        faults.append("balance is empty")
    elif len(lengths) == len(entries) and sum(lengths) != layers:
        faults.append(f"balance sums to {sum(lengths)} but the module has {layers} layers")
    if faults:
        shown = lengths if len(lengths) == len(entries) else entries
        raise PartitionError(f"{'; '.join(faults)} (balance: {shown}). {_remedy(len(entries), layers)}")
    return lengths


def _remedy(stages: int, layers: int) -> str:
    stages = max(1, min(stages, layers))
    equal = balance_costs([1] * layers, stages)
    return f"Use balance={equal}, or partition.balance_by_time({stages}, module, sample) to choose one."


def _stage(module: nn.Sequential, layers: Iterable[tuple[str, nn.Module | None]]) -> nn.Sequential:
    stage = sequential(dict(layers))
    stage.training = module.training  # of the stage alone: .train() would set the layers' too
    return stage
