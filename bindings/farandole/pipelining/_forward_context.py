"""A context of the user's around each forward of a stage, which is told the stage and the microbatch."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from farandole import _C

if TYPE_CHECKING:
    from farandole.pipelining._stage import PipelineStage


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """Which forward it is, as in torch.distributed.pipelining. No module is run for shapes: is_metadata_inference is False."""

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


Contexts: TypeAlias = OrderedDict[int, Callable[[PipelineStageInfo], AbstractContextManager[Any]]]


class ForwardsInContext:
    """Calls a stage's module inside the context that is registered, if one is."""

    def __init__(self, stage: PipelineStage, plan: _C.Plan):
        self._call = stage.submod if stage.arguments is None else stage.arguments.of(stage.submod)
        self._stage_index = index = stage.stage_index
        self._contexts = stage.forward_contexts
        row = plan.actions[plan.rank_of_stage[index]]
        self._microbatches = [int(number) for number in re.findall(rf"\b{index}F(\d+)\b", " ".join(row))]
        self._coming: Iterator[int] = iter(())

    def begin_step(self) -> None:
        self._coming = iter(self._microbatches)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = next(self._coming)  # the executor runs them in the order of the plan
        if not self._contexts:
            return self._call(*args, **kwargs)
        factory = next(iter(self._contexts.values()))
        with factory(PipelineStageInfo(stage_index=self._stage_index, microbatch_index=microbatch)):
            return self._call(*args, **kwargs)
        raise RuntimeError("the forward context suppressed what the module raised, expected it to let errors through")
