"""Writes v_schedules.csv beside it with the authors' own scheduler: run it again to renew it.

It takes zbv_greedy.py of github.com/sail-sg/zero-bubble-pipeline-parallelism (megatron/core/pipeline_parallel/zerobubble/
scheduler) on the path, where Megatron is importable, too. Of each schedule, number of ranks and number of microbatches
it notes the length of a step in which F, I and W take 1, and the most activations that a rank holds.
"""

import csv
import pathlib

from zbv_greedy import PipelineGraph

HERE = pathlib.Path(__file__).parent
COUNTS = [(p, times * p) for p in (2, 4, 8) for times in (1, 2, 3, 4, 8)] + [(16, 16), (16, 32)]


def of(memory, p, m):
    graph = PipelineGraph(p, m, memory, 1, 1, 1, 0)
    pattern = {"min": graph.stable_pattern_v_min, "half": graph.stable_pattern_v_half}[memory](p)
    _, begins, order = graph.schedule_from_pattern(pattern, m, [1] * 6)
    most = 0
    for actions in order:
        held = 0
        for kind, _ in actions:  # two forwards, two backwards for inputs, two for weights
            held += {0: 1, 2: -1}.get(kind // 2, 0)
            most = max(most, held)
    return max(time for rank in begins for times in rank for time in times) + 1, most


with open(HERE / "v_schedules.csv", "w", newline="") as file:
    for name, memory in (("V-Min", "min"), ("V-Half", "half")):
        csv.writer(file, lineterminator="\n").writerows((name, p, m, *of(memory, p, m)) for p, m in COUNTS)
