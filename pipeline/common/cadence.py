"""Validating calls: those that run the checks which the others leave out."""

__all__ = ["validates"]


def validates(number: int) -> bool:
    """Whether call `number`, counted from 1, is a validating one: 1, 2, 4, 8, ...

    What the first calls show is most of what there is to see, and the checks of a long run cost nothing in the end.

    >>> [number for number in range(1, 20) if validates(number)]
    [1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0
