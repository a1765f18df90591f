"""The share of a step in which the stages of a pipeline wait, measured and predicted."""

import dataclasses
import statistics

from farandole.pipelining import Plan, simulate


@dataclasses.dataclass
class TracedStep:
    """A step of one rank."""

    trace: list[tuple[str, float, float]]  # action, start, end (seconds)
    bubble: float  # 0 to 1

    def durations(self) -> dict[str, float]:
        return {action: end - start for action, start, end in self.trace}

    def seconds(self) -> float:
        return max(end for _, _, end in self.trace)


@dataclasses.dataclass
class Bubble:
    """Means over stages, medians over steps."""

    measured: float
    predicted: float  # of the plan, simulated with each step's own durations of forward and backward
    balanced: float  # of the plan, if all stages took the same time
    seconds: float
    predicted_seconds: float


def bubble_of(plan: Plan, ranks: list[list[TracedStep]]) -> Bubble:
    """From the same steps as each rank of a pipeline saw them."""
    median = statistics.median
    measured, predicted, seconds, predicted_seconds = [], [], [], []
    for step in zip(*ranks, strict=True):
        durations = {action: taken for rank in step for action, taken in rank.durations().items()}
        simulated = simulate(plan, durations)
        measured.append(statistics.mean(rank.bubble for rank in step))
        predicted.append(simulated.bubble)
        seconds.append(max(rank.seconds() for rank in step))
        predicted_seconds.append(simulated.makespan)
    balanced = simulate(plan, [(1.0, 2.0, 0.0, 0.0)] * plan.num_stages).bubble
    return Bubble(median(measured), median(predicted), balanced, median(seconds), median(predicted_seconds))
