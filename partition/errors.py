"""The error that this package raises when it is asked for something that it cannot do."""


class PartitionError(ValueError):
    """A balance, a module or a number that no partition can be made from.

    Its words say what was wrong, the value, and what to do.

    Example:
        >>> from partition import PartitionError, balance_costs
        >>> try:
        ...     balance_costs([1, 2], 3)
        ... except PartitionError as error:
        ...     print(error)
        cannot cut 2 layers into 3 stages: every stage needs a layer. Ask for 1 to 2 stages.
    """
