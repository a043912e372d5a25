"""The colours of actions in a figure.

    (kind, stage of the lane)  --colour-->  "#1f6fa8"  --ink-->  "#ffffff", for what is written on it

    lightness   24 B 37   45 F 57   64 I 72   84 W 89   95 idle        (CIE L*, from the first to the last stage)

Each kind has a band of lightness of its own, so that kinds can be distinguished in grey print and under every kind of
colour blindness; forward is blue, what goes backward is warm. Within its band a kind is the paler the later the stage.
"""

from scheduler.action import Kind

IDLE_COLOUR = "#eef0f2"


def colour(kind: Kind, index: int = 0, stages: int = 1) -> str:
    """The colour of a kind.

    Args:
        kind: what the action does; messages are grey
        index: which of its lane's stages the action is of, from 0
        stages: how many a lane has at most

    >>> colour(Kind.F), colour(Kind.F, index=1, stages=2)
    ('#1f6fa8', '#4690c4')
    """
    deep, pale = _BANDS.get(kind, _MESSAGE)
    share = index / (stages - 1) if stages > 1 else 0
    mixed = (round(first + share * (last - first)) for first, last in zip(_parts(deep), _parts(pale)))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(background: str) -> str:
    """Black or white: what reads better on `background` (its relative luminance by WCAG 2, against the even point).

    >>> ink("#6d1a36"), ink("#f0cd6e")
    ('#ffffff', '#111111')
    """
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
              for part in (whole / 255 for whole in _parts(background)))
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
    return "#ffffff" if luminance < 0.19 else "#111111"


def _parts(text: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(text[1:]))


_BANDS = {
    Kind.F: ("#1f6fa8", "#4690c4"),
    Kind.B: ("#6d1a36", "#963150"),
    Kind.I: ("#e0806f", "#eb9c8c"),
    Kind.W: ("#f0cd6e", "#f7df98"),
}
_MESSAGE = ("#9aa0a6", "#9aa0a6")
