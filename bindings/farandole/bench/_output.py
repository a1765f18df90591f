"""Reports as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from farandole.bench._series import Report, Series, Target


def print_report(console: Console, report: Report) -> None:
    """A row for each case with the peers as columns, or a row for each peer with its quantities as columns."""
    quantities = _distinct(series.quantity for series in report.series)
    by_peer = len(quantities) == 1 and not report.peers_as_rows
    columns = _distinct(series.peer for series in report.series) if by_peer else quantities
    ratios = _distinct(ratio.name for ratio in report.ratios)
    table = Table(title=report.title, title_justify="left", caption="medians; ± half the middle half of the samples")
    for name in ["", *([] if by_peer else [""]), *columns, *ratios]:
        table.add_column(name, justify="right" if name else "left", overflow="fold")

    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for series in report.series:
        row = rows.setdefault(_row_of(series, by_peer), {})
        row[series.peer if by_peer else series.quantity] = cell(series)
    for ratio in report.ratios:
        rows[_row_of(ratio.over, by_peer)][ratio.name] = value_text(ratio.median(), ratio.unit)
    for key, row in rows.items():
        table.add_row(*key, *(row.get(name, "") for name in [*columns, *ratios]))
    console.print(table)
    for note in report.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    console.print()


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table(title="Targets", title_justify="left")
    for name in ("", "measured", "target", ""):
        table.add_column(name, justify="right" if name else "left")
    for target in targets:
        bound = f"{'at most' if target.at_most else 'at least'} {limit_text(target)}"
        measured = value_text(target.measured, target.unit)
        table.add_row(target.name, measured, bound, "[green]met[/]" if target.met() else "[red]not met[/]")
    console.print(table)


def cell(series: Series) -> str:
    median = series.median()
    if series.unit == "ratio":
        return f"{median:.3f}x"
    text = f"{time_text(median)} ±{100 * series.spread():.0f}%"
    if series.bytes_each_way is not None:
        text += f" {series.bytes_each_way / median / 1e9:.2f} GB/s"
    return text


def value_text(value: float, unit: str) -> str:
    if unit == "s":
        return time_text(value)
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.2f}x"


def limit_text(target: Target) -> str:
    if target.unit == "ratio":
        return f"{target.limit:g}x"
    return f"{100 * target.limit:g} %" if target.unit == "share" else time_text(target.limit)


def time_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def to_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """All that was measured, every sample included; times in seconds."""
    return [
        {
            "subject": report.subject,
            "title": report.title,
            "series": [
                {
                    "case": series.case,
                    "peer": series.peer,
                    "quantity": series.quantity,
                    "unit": series.unit,
                    "bytes_each_way": series.bytes_each_way,
                    "median": series.median(),
                    "spread": series.spread(),
                    "rounds": [[sample._asdict() for sample in samples] for samples in series.rounds],
                }
                for series in report.series
            ],
            "ratios": [
                {"case": one.case, "name": one.name, "unit": one.unit, "median": one.median()} for one in report.ratios
            ],
            "targets": [
                {
                    "name": one.name,
                    "measured": one.measured,
                    "limit": one.limit,
                    "unit": one.unit,
                    "kind": "at most" if one.at_most else "at least",
                    "met": one.met(),
                }
                for one in report.targets
            ],
            "notes": report.notes,
        }
        for report in reports
    ]


def _row_of(series: Series, by_peer: bool) -> tuple[str, ...]:
    return (series.case,) if by_peer else (series.case, series.peer)


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
