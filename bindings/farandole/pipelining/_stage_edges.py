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
        edges = edges_of(plan)
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

    def microbatches_of_one_model(self) -> int:
        """Of each copy of the model, where a plan has several: its gradients are means over those."""
        counts = {stage: len(microbatches) for stage, microbatches in self.last.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(
                f"the last stages run {counts} microbatches (by stage), expected equally many, or scale_grads=False"
            )
        return next(iter(counts.values()))

    def microbatches_that_end_in(self, stages: list[int]) -> list[int]:
        return sorted(microbatch for stage in stages for microbatch in self.last.get(stage, ()))


def edges_of(plan: _C.Plan) -> list[tuple[int, int]]:
    edges = plan.edges
    return [(stage, stage + 1) for stage in range(plan.num_stages - 1)] if edges is None else edges


def pairs_of(edges: Sequence[Edge] | None) -> list[tuple[int, int]] | None:
    """(from, to) of each: which outputs it takes is what stages do, and not the plan's."""
    if edges is None:
        return None
    for number, edge in enumerate(edges):
        if (
            not isinstance(edge, (tuple, list))
            or len(edge) not in (2, 3)
            or not all(type(end) is int for end in edge[:2])
        ):
            raise ValueError(f"edges[{number}] is {edge!r}, expected (from, to) or (from, to, outputs), by stage")
    return [(edge[0], edge[1]) for edge in edges]


def selected_outputs(edges: Sequence[Edge] | None) -> dict[tuple[int, int], list[int]]:
    """By edge, where it takes only some of the outputs, which."""
    return {(edge[0], edge[1]): list(edge[2]) for edge in edges or () if len(edge) == 3}


def outputs_by_stage(selected: dict[tuple[int, int], list[int]], plan: _C.Plan) -> dict[int, dict[int, list[int]]]:
    """By stage, for each stage that gets some of its outputs, which."""
    known = set(edges_of(plan))
    by_stage: dict[int, dict[int, list[int]]] = {}
    for (begin, end), outputs in selected.items():
        if (begin, end) not in known:
            raise ValueError(f"outputs are chosen for ({begin}, {end}), expected an edge of the plan: {sorted(known)}")
        by_stage.setdefault(begin, {})[end] = outputs
    return by_stage
