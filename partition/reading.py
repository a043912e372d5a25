"""Values that JSON gave, read as the types of fields say: what is of another type is refused by its place.

    {"rows": 4, "layers": [{...}]}  ──typed(Profile, ...)──►  Profile(rows=4, layers=(LayerProfile(...),))
    {"rows": "4", ...}              ───────────────────────►  ValueError: rows is '4', but must be a whole number

Numbers are times, sizes, shares and places: finite, and not negative. A list stands for a tuple or a NamedTuple, a dict
for a dataclass or a NamedTuple.
"""

import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from scheduler.errors import refuse_unless_finite, whole_number


def typed(kind: Any, value: Any, place: str = "") -> Any:
    """A value of a type.

    Args:
        kind: int, float, str, a Literal, a tuple of types, a type or None, a dataclass or a NamedTuple of these.
        value: that JSON gave.
        place: where it stands.

    Raises:
        ValueError, TypeError: it is none, or names are missing or too many.

    Example:
        >>> typed(tuple[int, ...], [1, 2]), typed(float | None, None), typed(Literal["s", "FLOP"], "s")
        ((1, 2), None, 's')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is int:
        return whole_number(place, value, least=0)
    if kind is float:
        refuse_unless_finite(place, value)
        return value
    if origin is types.UnionType:
        return None if value is None else typed(arguments[0], value, place)
    if origin is tuple:
        is_any_length = arguments[-1] is Ellipsis
        listed = _listed(value, place, None if is_any_length else len(arguments))
        kinds = arguments[:1] * len(listed) if is_any_length else arguments
        pairs = enumerate(zip(kinds, listed))
        return tuple([typed(item_kind, item, f"{place}[{index}]") for index, (item_kind, item) in pairs])
    if hasattr(kind, "_fields") or is_dataclass(kind):
        if not isinstance(value, Mapping):
            names = get_type_hints(kind)
            value = dict(zip(names, _listed(value, place, len(names))))
        return kind(**typed_fields(kind, value, place))
    if value not in arguments if origin is Literal else not isinstance(value, kind):
        raise ValueError(f"{place} is {value!r}, but must be {' or '.join(map(repr, arguments)) or kind.__name__}")
    return value


def typed_fields(kind: Any, fields: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Those of some fields of a dataclass or a NamedTuple that it has."""
    hints = get_type_hints(kind)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise ValueError(f"there is no {min(unknown)!r} in a {kind.__name__}")
    return {name: typed(hints[name], value, f"{place}.{name}".lstrip(".")) for name, value in fields.items()}


def _listed(value: Any, place: str, count: int | None) -> list[Any]:
    """A list of so many values; None: of any number."""
    if not isinstance(value, list) or count not in (None, len(value)):
        raise ValueError(f"{place or 'all of it'} is {value!r}, but must be a list{count and f' of {count}' or ''}")
    return value
