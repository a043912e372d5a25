"""Law: what is built without memory is what a state_dict has, and all else is as when it is built with."""

import pytest
import torch
from families import FAMILIES, of_family
from peak import peak_bytes
from test_meta_init import LAYERS
from torch import nn

from pipeline import meta_parameters


def ties(model):
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def assert_meta(build):
    real = build()
    with meta_parameters():
        empty = build()
    ours, theirs = empty.state_dict(keep_vars=True), real.state_dict(keep_vars=True)
    assert list(ours) == list(theirs) and all(tensor.is_meta for tensor in ours.values())
    for name, tensor in theirs.items():
        other = ours[name]
        assert type(other) is type(tensor) and other.requires_grad == tensor.requires_grad
        assert (other.shape, other.dtype, other.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert ties(empty) == ties(real)
    buffers = dict(real.named_buffers())
    for name, tensor in empty.named_buffers():
        assert name in ours or torch.equal(tensor, buffers[name])
    assert len(dict(empty.named_buffers())) == len(buffers)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "own"])
def test_layers_of_torch_are_built_without_memory(kind):
    assert_meta(LAYERS[kind])


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_keep_their_tables(family):
    assert_meta(lambda: of_family(family)[0])


def test_tied_parameters_stay_one_and_what_had_values_keeps_them():
    before = nn.Linear(2, 2)
    with meta_parameters():
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        weight = nn.Parameter(torch.ones(2, 2))
        one.weight = weight
        other.weight = weight
        lazy = nn.LazyLinear(3)
    assert one.weight is other.weight is weight and weight.is_meta
    assert not before.weight.is_meta and not nn.Linear(2, 2).weight.is_meta
    lazy(torch.ones(2, 4))
    assert lazy.weight.shape == (3, 4)


def test_after_an_error_modules_are_built_as_ever():
    with pytest.raises(ZeroDivisionError), meta_parameters():
        nn.BatchNorm1d(2)
        1 / 0
    assert not any(tensor.is_meta for tensor in nn.BatchNorm1d(2).state_dict().values())


def test_no_more_than_one_parameter_has_memory():
    def build():
        with meta_parameters():
            return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    assert peak_bytes(build) <= 4 * 257 * 257
