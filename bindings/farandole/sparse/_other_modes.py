"""Batches in flight when the mode of the model changes."""

from __future__ import annotations

import warnings

from torch import nn


def warn_of_other_mode(model: nn.Module, was_training: bool | None, in_flight: int) -> None:
    """Where another iterator comes.

    Args:
        was_training: in the step before; None for none.
    """
    if was_training is None or was_training is model.training or not in_flight:
        return
    now = "trained on, which were to be evaluated" if model.training else "evaluated, and not trained on"
    warnings.warn(
        f"another iterator, and model.{'train' if model.training else 'eval'}(), while {in_flight} batches "
        f"of the one before are in flight: these are {now}. Give each mode a pipeline of its own of the same model "
        "(EvalPipelineSparseDist), or call progress() until the data ends",
        stacklevel=3,
    )
