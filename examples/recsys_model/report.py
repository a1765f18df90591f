"""What rank 0 shows: how well held-out flights are predicted, how fast each loop was, and whether all learned the same."""

import dataclasses
import statistics
import sys

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recsys_model.flights import LATE, Flights

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclasses.dataclass
class Result:
    """Of one loop."""

    name: str
    speeds: list[float]  # steps per second of each round; the first is warm-up
    losses: list[float]
    logits: Tensor  # of the held-out flights


def area_under_curve(logits: Tensor, late: Tensor) -> float:
    """The share of pairs of a late flight and another in which the late one has the higher logit; ties are halves."""
    _, places, counts = logits.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[places]  # from 1, the mean for ties
    positives = int(late.sum())
    above = ranks[late > 0].sum().item() - positives * (positives + 1) / 2
    return above / (positives * (len(late) - positives))


def opening(flights: Flights, size: int, ranks: int, steps: int, rounds: int) -> None:
    console.print(
        f"flights   {len(flights.train):,} to train on, {len(flights.held_out):,} held out, "
        f"{flights.train.late.mean():.1%} more than {LATE} minutes late"
    )
    console.print(f"tables    {', '.join(f'{name} {rows}' for name, rows in flights.rows.items())}")
    console.print(f"training  {ranks} ranks, batches of {size} each; {rounds} rounds of {steps} steps for every loop")


def findings(results: list[Result], late: Tensor, rate: float) -> None:
    """`rate` is what the constant predictor knows: how many of the training part were late."""
    table = Table("", "steps/s", "AUC", "log-loss", box=SIMPLE)
    for result in results:
        loss = F.binary_cross_entropy_with_logits(result.logits, late).item()
        speed = statistics.median(result.speeds[1:] or result.speeds)
        table.add_row(result.name, f"{speed:.1f}", f"{area_under_curve(result.logits, late):.4f}", f"{loss:.4f}")
    constant = torch.full_like(late, rate)
    table.add_row("constant", "", f"{0.5:.4f}", f"{F.binary_cross_entropy(constant, late).item():.4f}")
    console.print(table)


def check(results: list[Result], tolerance: float) -> int:
    """The exit status says whether all loops had the losses of the first one."""
    status = 0
    first, *others = results
    for other in others:
        differences = [abs(a - b) for a, b in zip(first.losses, other.losses, strict=True)]
        worst = max(range(len(differences)), key=differences.__getitem__)
        agrees = differences[worst] <= tolerance
        status |= not agrees
        console.print(
            f"{'equal' if agrees else 'NOT EQUAL'}: losses of '{other.name}' and '{first.name}' differ by at most "
            f"{differences[worst]:.1e}, in step {worst + 1}"
        )
    return status
