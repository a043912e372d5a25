"""Do two ways of training leave the same bits? Copies of everything, and their comparison."""

import torch
from torch import nn


def everything(*things):
    """Copies of all tensors in modules, optimizers, parameters, lists."""
    found = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += everything(*thing.state_dict().values())
        elif isinstance(thing, torch.optim.Optimizer):
            state = thing.state_dict()["state"]
            found += [(key, name) for key in sorted(state) for name in state[key]]
            found += everything(*[value for key in sorted(state) for value in state[key].values()])
        elif isinstance(thing, torch.Tensor):
            found.append(thing.detach().clone())
        else:
            found.append(thing)
    return found


def same(these, those):
    assert len(these) == len(those)
    for one, other in zip(these, those, strict=True):
        equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert equal, (one, other)
    return True


def twins(run):
    """`run(is_eager)` gives the same both ways: with the optimizer, and with an EagerUpdate."""
    return same(run(False), run(True))
