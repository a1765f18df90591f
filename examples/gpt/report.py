"""What the training shows: progress while it runs, findings at the end."""

import sys
import time

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from gpt.bubble import Bubble
from gpt.model import Gpt, held_out_loss, sample
from gpt.recipe import Recipe, train_plainly
from gpt.text import Text, bigram_loss

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Progress:
    """A bar with loss and tokens/s on a terminal, and a line now and then elsewhere."""

    LINES = 12

    def __init__(self, label: str, steps: int, tokens: int, visible: bool):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(),
                   TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
                   TimeRemainingColumn())  # fmt: skip
        self._bar = Bar(*columns, console=console, disable=not (visible and console.is_terminal))
        self._task = self._bar.add_task(label, total=steps, loss=float("nan"), speed=0.0)
        self._prints = visible and not console.is_terminal
        self._label, self._steps, self._tokens = label, steps, tokens

    def __enter__(self) -> "Progress":
        self._start = self._last = time.perf_counter()
        self._speed = 0.0
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def tick(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        speed = self._tokens / (now - self._last)
        self._last = now
        self._speed = speed if step == 0 else 0.95 * self._speed + 0.05 * speed
        self._bar.update(self._task, advance=1, loss=loss, speed=self._speed)
        if self._prints and (step + 1 == self._steps or step % max(1, self._steps // self.LINES) == 0):
            line = f"{self._label}  step {step + 1:5d}/{self._steps}  loss {loss:.3f}  {self._speed:8,.0f} tokens/s"
            console.print(f"{line}  {now - self._start:6.1f} s")


def heading(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def opening(recipe: Recipe, text: Text, backend: str, replicas: int, stages: int, microbatches: int) -> None:
    shape = recipe.shape
    weights = sum(p.numel() for p in Gpt(shape, recipe.seed).parameters())
    heading(f"{stages} pipeline stages x {replicas} data-parallel replicas, backend {backend}, schedule 1F1B")
    console.print(f"model     {shape.layers} layers, width {shape.width}, {shape.heads} heads, {weights:,} weights")
    console.print(f"text      {len(text.train):,} bytes to train on, {len(text.held_out):,} held out")
    rows = recipe.batch // replicas // microbatches
    console.print(
        f"step      {recipe.batch} rows of {shape.length} bytes; a replica takes {microbatches} microbatches of {rows}\n"
    )


def transports(pairs: dict[tuple[int, int], str]) -> None:
    heading("transport of each pair of ranks")
    ranks = sorted({rank for pair in pairs for rank in pair})
    table = Table("from \\ to", *map(str, ranks), box=SIMPLE)
    for rank in ranks:
        table.add_row(str(rank), *(pairs.get((rank, peer), "") for peer in ranks))
    console.print(table)


def bubble(found: Bubble) -> None:
    heading("pipeline bubble (share of a step in which a stage does not compute)")
    steps = "forward and backward of a step"
    console.print(f"measured  {found.measured:6.1%}   {steps} {found.seconds * 1e3:7.2f} ms, median")
    console.print(f"predicted {found.predicted:6.1%}   {steps} {found.predicted_seconds * 1e3:7.2f} ms, simulated")
    console.print(f"balanced  {found.balanced:6.1%}   (p - 1) / (m + p - 1), were all stages alike")


def held_out(model: Gpt, text: Text, length: int) -> None:
    heading("held-out loss (nats for a byte)")
    console.print(f"bigram    {bigram_loss(text):.3f}")
    console.print(f"trained   {held_out_loss(model, text.held_out, length):.3f}")


def generated(model: Gpt, prompt: str, count: int, length: int, seed: int) -> None:
    heading("sample")
    out = sample(model, prompt.encode() or b"\n", count, length, seed)
    console.print(out.decode(errors="replace"), markup=False)


def check(recipe: Recipe, text: Text, losses: list[float], steps: int, tolerance: float) -> int:
    """Repeats the first steps in this process alone; the exit status says whether the losses agree."""
    if steps == 0:
        return 0
    heading(f"the first {steps} steps again, in one plain process")
    with Progress("plain", steps, recipe.batch * recipe.shape.length, True) as progress:
        plain = train_plainly(recipe, text, steps, progress.tick)
    differences = [abs(a - b) for a, b in zip(losses, plain, strict=False)]
    worst = max(range(steps), key=differences.__getitem__)
    agrees = differences[worst] <= tolerance
    console.print(
        f"{'equal' if agrees else 'NOT EQUAL'}: the largest difference of a loss is {differences[worst]:.1e} nats, in "
        f"step {worst + 1} (tolerance {tolerance:.0e}: sums run in another order)"
    )
    return 0 if agrees else 1
