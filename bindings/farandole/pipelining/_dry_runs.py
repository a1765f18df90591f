"""Runs of one rank of a pipeline whose other ranks are only pretended, by torch's backend "fake"."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._stage_edges import Ends


def is_dry(group: dist.ProcessGroup | None) -> bool:
    """Whether nothing can be learned of the other ranks."""
    return group is not None and group.size() > 1 and dist.get_backend(group) == "fake"


def check_declared(stages: Sequence[PipelineStage], ends: Ends) -> None:
    """
    Raises:
        ValueError: the shape of what goes between two stages is not known.
    """
    for stage in stages:
        for name, declared, is_end in (
            ("input_args", stage.declared_inputs, stage.stage_index in ends.first),
            ("output_args", stage.declared_outputs, stage.stage_index in ends.last),
        ):
            if declared is None and not is_end:
                raise ValueError(
                    f"{name} of stage {stage.stage_index} is None, expected example tensors of a microbatch: the "
                    'backend of the pipeline\'s group is "fake", over which no shapes can be learned'
                )
