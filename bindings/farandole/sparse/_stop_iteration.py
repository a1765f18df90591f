"""A StopIteration that is not of the iterator, which ``progress`` passes on for the end of the data."""

from __future__ import annotations


def as_no_end(error: BaseException) -> BaseException:
    """What is to be raised in its place; all else as it is. As in generators."""
    if not isinstance(error, StopIteration):
        return error
    made = RuntimeError(
        "a stage or the model raised StopIteration, which only the iterator's __next__ may: it would pass for the end of "
        "the data"
    )
    made.__cause__ = error
    return made
