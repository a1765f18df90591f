"""What one rank refuses reaches the others: they learn the reason from their next step, instead of waiting in it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from farandole import _C
from farandole._rank_names import rank_name

# Seconds for which a rank whose constructor failed waits for the others to come to their first step.
PATIENCE = 60.0


@contextlib.contextmanager
def refusal(group: Any, patience: float | None = None) -> Iterator[None]:
    """What is raised inside is the others' error, too: this rank takes part in the beginning of their next step.

    Args:
        group: the pipeline's; nobody is told where it is none that this process is in with others.
        patience: seconds to wait for the others; until the group's timeout if None.
    """
    try:
        yield
    except Exception as error:
        tell_others(group, error, patience)
        raise


class RefusesOnAllRanks(type):
    """Of classes whose constructor may refuse on one rank what it takes on others, unknown arguments included.

    The class method ``_group_of_arguments(args, kwargs)`` says which group the others are in.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's, for help() and editors, which would show that of __call__."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            tell_others(cls._group_of_arguments(args, kwargs), error, PATIENCE)  # type: ignore[attr-defined]
            raise


def tell_others(group: Any, error: Exception, patience: float | None = None) -> None:
    """As :func:`refusal`, of an error that is being handled; once for each error."""
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    if getattr(error, "_farandole_told", False):  # by a constructor that was called inside
        return
    error._farandole_told = True  # type: ignore[attr-defined]
    # What the others then see is of no interest here: this rank raises its own error.
    with contextlib.suppress(RuntimeError):
        _C.refuse_pipeline_step(group, f"{rank_name(group)}: {type(error).__name__}: {error}", patience)
