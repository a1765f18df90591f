"""The graph of stages, as schedules are given it and as they look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole import _C

Edge = tuple[int, int] | tuple[int, int, Sequence[int]]
"""(from, to): what a stage returns is given to another one; or (from, to, outputs), only those, by their places."""


@dataclass(frozen=True)
class Ends:
    """Where microbatches enter and leave a plan's graph of stages."""

    first: set[int]
    last: dict[int, range]  # by stage: the microbatches that it runs

    @classmethod
    def of(cls, plan: _C.Plan) -> Ends:
        edges = plan.edges
        if edges is None:
            edges = [(stage, stage + 1) for stage in range(plan.num_stages - 1)]
        stages = set(range(plan.num_stages))
        ranges = plan.microbatches_of_stage or [(0, plan.num_microbatches)] * plan.num_stages
        last = {stage: range(*ranges[stage]) for stage in sorted(stages - {begin for begin, _ in edges})}
        seen: dict[int, int] = {}
        for stage, microbatches in last.items():
            for microbatch in microbatches:
                if seen.setdefault(microbatch, stage) != stage:
                    raise ValueError(
                        f"microbatch {microbatch} ends in stages {seen[microbatch]} and {stage}, expected one last "
                        "stage for each, which computes its loss"
                    )
        return cls(stages - {end for _, end in edges}, last)

    @property
    def microbatches_of_one_model(self) -> int:
        """Of each copy of the model, where a plan has several: its gradients are means over those."""
        return len(next(iter(self.last.values())))

    def microbatches_that_end_in(self, stages: list[int]) -> list[int]:
        return sorted(microbatch for stage in stages for microbatch in self.last.get(stage, ()))


def outputs_by_stage(edges: Sequence[Edge]) -> dict[int, dict[int, list[int]]]:
    """By stage, for each stage that gets some of its outputs, which."""
    selected: dict[int, dict[int, list[int]]] = {}
    for edge in edges:
        if len(edge) == 3:
            selected.setdefault(edge[0], {})[edge[1]] = list(edge[2])
    return selected
