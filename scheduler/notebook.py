"""The cell that a notebook shows of a result: the lines that it prints, and below them its picture, if it has one.

    >>> class Answer(NotebookResult):
    ...     def __str__(self) -> str:
    ...         return "1 < 2"
    >>> Answer()._repr_html_()
    '<pre>1 &lt; 2</pre>'
"""

from abc import ABC, abstractmethod
from base64 import b64encode
from html import escape


class NotebookResult(ABC):
    """A result that prints as a few lines."""

    @abstractmethod
    def __str__(self) -> str:
        """The lines."""

    def __repr__(self) -> str:
        return str(self)

    def _picture(self) -> str | None:
        """The text of an SVG file. None: there is no picture, or no matplotlib."""
        return None

    def _repr_html_(self) -> str:
        text, picture = f"<pre>{escape(str(self))}</pre>", self._picture()
        if picture is None:
            return text
        # By itself, not as a part of the page: its names cannot meet those of another picture.
        return f'{text}<img src="data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}">'
