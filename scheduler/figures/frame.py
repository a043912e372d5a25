"""Where does what stand on the page of a figure?

                    left            time ──►           right
                     ┌ title, legend ────────────────────┐
                     │ lane 0  [rows, one each `pitch`]  │
                     │         axis                      │
                     │ lane 0  [memory]              max │
                     └ footer ───────────────────────────┘

All lengths are pixels at the figure's own width; an SVG scales.
"""

from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

__all__ = ["Frame", "add", "number", "wide"]


@dataclass(frozen=True)
class Frame:
    """The columns of a figure, and how high a row is.

    Args:
        lanes: how many rows there are
        makespan: the time at the right end
        width: of the whole figure
    """

    lanes: int
    makespan: float
    width: int

    @property
    def left(self) -> float:
        """Where time begins: after the longest name of a lane."""
        return wide(f"lane {self.lanes - 1}", _TEXT) + 22

    @property
    def right(self) -> float:
        """Where time ends."""
        return self.width - _RIGHT

    @property
    def plot(self) -> float:
        """How wide the makespan is."""
        return self.right - self.left

    @property
    def row(self) -> float:
        """How high a lane is: the more lanes, the lower."""
        return max(8.0, min(24.0, 640 / self.lanes))

    @property
    def gap(self) -> float:
        """Between two rows."""
        return 3 if self.row > 14 else 1.5

    @property
    def pitch(self) -> float:
        """From one lane to the next."""
        return self.row + self.gap

    def x(self, time: float) -> float:
        """Where `time` is."""
        return self.left + (self.plot * float(time) / float(self.makespan) if self.makespan else 0)


def add(parent: Element, tag: str, text: str | None = None, **attributes: str | float) -> Element:
    """A new element at the end of `parent`; an attribute's `_` stands for `-`, and numbers are rounded.

    >>> from xml.etree.ElementTree import tostring
    >>> tostring(add(Element("g"), "text", "0F0", x=1 / 3, font_size=11))
    b'<text x="0.33" font-size="11">0F0</text>'
    """
    written = {name.replace("_", "-"): value if isinstance(value, str) else number(value)
               for name, value in attributes.items()}
    element = SubElement(parent, tag, written)
    element.text = text
    return element


def number(value: float) -> str:
    """A length with two digits after the point, and none that say nothing.

    >>> number(2.0), number(1 / 3), number(-0.001)
    ('2', '0.33', '0')
    """
    return f"{round(value, 2) + 0:.2f}".rstrip("0").rstrip(".")


def wide(text: str, size: float) -> float:
    """About how wide `text` is: nobody knows which font there will be."""
    return 0.58 * size * len(text)


_TEXT = 11
_RIGHT = 44
