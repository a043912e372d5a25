"""The description of a model or a loss in words that are the same in every process: no address, no order of a set.

    tensors    dtype, shape and a digest of the values
    modules    class, extra_repr, attributes of each, and the values of all parameters and buffers; of a model's the
               attributes that are numbers or words, of its modules beside the layers, too
    functions  name, code, defaults, what they have captured and the globals that they name; a partial: its function and
               arguments
    others     class, its functions, and attributes, or what one without attributes prints; so do modules that are a
               loss or a part of one
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from partition.containers import reader_of
from partition.names import OF_EVERY_MODULE, NamedLayer
from partition.opaque import type_name
from pipeline.data.loss_key import captured
from pipeline.distributed.agreement import digest, values_in_words

_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), numpy.generic, torch.dtype, torch.device)


def architecture(module: nn.Module) -> str:
    """The classes of all modules, what they print of themselves, and attributes that are numbers or words."""
    printed = [(name, type_name(part), part.extra_repr(), _plain(part)) for name, part in module.named_modules()]
    words = [f"{name} {kind}({text}) {numbers}" for name, kind, text, numbers in printed]
    return _without_addresses("; ".join(words))


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _plain(module: nn.Module) -> list[tuple[str, Any]]:
    own = [(name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    in_model = module.in_model if isinstance(module, NamedLayer) else None
    tables = {} if in_model is None else in_model.settings
    own += [(f"{name}.{key}", value) for name, settings in tables.items() for key, value in settings.items()]
    return sorted([(name, value) for name, value in own if isinstance(value, _PLAIN)])


def value_in_words(value: Any, depth: int = _DEPTH) -> str:
    """A value in words; what is deeper than `depth` by its class alone.

    Example:
        >>> value_in_words(partial(max, 2, key=[0.5, None]))
        'partial(builtins.max, [2], {key: [0.5, None]})'
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return values_in_words([value])
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype}{value.shape} {digest(value.tobytes().hex())}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if depth == 0:
        return type_name(value)
    if isinstance(value, partial):
        return f"partial({', '.join(_identities((value.func, value.args, value.keywords), depth))})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_identities(reader_of(type(value))(value), depth))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_identities(reader_of(type(value))(value), depth)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join([f'{name}: {value_in_words(item, depth - 1)}' for name, item in value.items()])}}}"
    if isinstance(value, types.MethodType):
        return f"{value_in_words(value.__func__, depth)} of {value_in_words(value.__self__, depth)}"
    if isinstance(value, types.CodeType):
        return f"code {value.co_code.hex()} {value.co_names} {value_in_words(value.co_consts, depth)}"
    if isinstance(value, types.FunctionType):
        parts = [*_identities((value.__code__, *captured(value)), depth), *_globals_in_words(value, depth)]
        return f"{value.__module__}.{value.__qualname__}({', '.join(parts)})"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, nn.Module):
        tables = [vars(item).items() for item in value.modules()]
        own = [{name: item for name, item in table if name not in OF_EVERY_MODULE} for table in tables]
        attributes, functions = _identities(own, depth), _functions_of(value, depth)
        tensors = values_in_words([*value.parameters(), *value.buffers()])
        return f"{architecture(value)} {functions} {attributes} {tensors}"
    if not hasattr(value, "__dict__"):
        return f"{type_name(value)} {_without_addresses(repr(value))}"
    return f"{type_name(value)} {_functions_of(value, depth)} {value_in_words(vars(value), depth)}"


def _functions_of(value: Any, depth: int) -> list[str]:
    """The functions that the class of a value defines."""
    return _identities([item for item in vars(type(value)).values() if isinstance(item, types.FunctionType)], depth)


def _globals_in_words(function: types.FunctionType, depth: int) -> Iterator[str]:
    """The globals that a function names: functions as others are, of all else what is plain or a tensor in it.

    Not more, as a logger holds all loggers; and not those of torch, whose compiler keeps what it has done in them.
    """
    table = function.__globals__
    if table.get("__name__", "").partition(".")[0] != "torch":
        for name in filter(table.__contains__, _names_in(function.__code__)):
            levels = depth - 1 if isinstance(table[name], types.FunctionType) else 1
            yield f"{name}: {value_in_words(table[name], levels)}"


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals, and of attributes, in the code of a function and of those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _identities(values: Iterable[Any], depth: int) -> list[str]:
    return [value_in_words(value, depth - 1) for value in values]
