"""A training that any process can do for its own parameters alone: gradients follow from name, step and value.

    uninterrupted    one process has all parameters, one optimizer steps them
    in parts         each part has some layers and an optimizer for them; what others have it never sees

The two must agree bit for bit, and so must one that is saved by some parts and goes on in others.
"""

import zlib
from functools import partial

import torch
from torch import nn, optim

LAYERS = 6
CUTS = {1: [[0, 6]], 2: [[0, 3, 6], [0, 5, 6]], 3: [[0, 2, 4, 6], [0, 1, 2, 6]]}

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(optim.Adam, lr=0.1),
    "amsgrad": partial(optim.Adam, lr=0.1, amsgrad=True, foreach=True),
    "fused": partial(optim.AdamW, lr=0.1, fused=True),
    "adamw": partial(optim.AdamW, lr=torch.tensor(0.1), betas=(0.8, 0.95)),
    "adamax": partial(optim.Adamax, lr=0.1),
    "nadam": partial(optim.NAdam, lr=0.1),
    "radam": partial(optim.RAdam, lr=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.1),
    "adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.2),
    "adafactor": partial(optim.Adafactor, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "rprop": partial(optim.Rprop, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1, t0=2),
}
FRESH = {"lr": 0.7}  # what a script would not set so: the saved options must win


def net():
    """Six layers: the first and the last tied, two with nothing to train."""
    torch.manual_seed(8)
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
    )
    model[5].weight = model[0].weight
    return model


def names_of(model, start=0, end=LAYERS):
    """(name, parameter) of some layers, tied ones under every name."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, param) for name, param in named if start <= int(name.partition(".")[0]) < end]


def grouped(named, turned=False):
    """Two groups of options, as scripts have them; one may be empty where a part has no such parameters."""
    params = {id(param): param for _, param in (reversed(named) if turned else named)}.values()
    wide = [param for param in params if param.dim() > 1]
    rest = [param for param in params if param.dim() < 2]
    return [{"params": wide}, {"params": rest, "weight_decay": 0.0}]


def make(kind, named, turned=False, **more):
    """An optimizer for some parameters."""
    return OPTIMIZERS[kind](grouped(named, turned), **more)


def grad_of(name, step, param):
    """None where there is no gradient yet: the state of that parameter begins later."""
    if name == "3.bias" and step < 5 or name == "4.weight" and step % 3 == 1:
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{step}".encode()))
    return torch.randn(param.shape, generator=generator) + 0.1 * param.detach()


def train(named, optimizer, steps, before=lambda step: None):
    """Some steps; the gradient of a tied parameter follows from its first name in the whole model."""
    for step in steps:
        before(step)
        for name, param in named:
            param.grad = grad_of("0.weight" if name == "5.weight" else name, step, param)
        optimizer.step()


def uninterrupted(kind, steps):
    """The parameters after all steps, by name."""
    model = net()
    named = names_of(model)
    train(named, make(kind, named), steps)
    return {name: param.detach() for name, param in named}
