"""``python -m farandole.plan``: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from farandole import plan as command
from farandole.pipelining import Plan, lower, plan, simulate
from support.devices import only_on_cpu

pytestmark = only_on_cpu("no tensors")


COUNTS = ["--stages", "4", "--microbatches", "6"]


def test_it_draws_when_nothing_else_is_asked_for() -> None:
    line = [sys.executable, "-m", "farandole.plan", "1F1B", *COUNTS, "--seconds", "1,2,1,1", "--columns", "27"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("step 27 s, bubble 33.3%\nrank 0 |FFFF")
    assert len(done.stdout.splitlines()) == 5


def test_it_writes_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, svg, trace = (tmp_path / name for name in ("plan.csv", "step.svg", "step.json"))
    files = ["--csv", str(csv), "--svg", str(svg), "--trace", str(trace)]
    command.main(
        ["zbv", *COUNTS, "--ranks", "2", "--validate", "tagged", "--transfer", "0.5", "--memory", "3,1", *files]
    )
    lowered = lower(plan("ZBV", 4, 6, num_ranks=2), "tagged")
    assert Plan.from_csv(csv.read_text(), lowered.rank_of_stage) == lowered
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    events = json.loads(trace.read_text())["traceEvents"]
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end == pytest.approx(simulate(lowered, [(1, 2, 1, 1)] * 4, 0.5).makespan * 1e6)
    assert capsys.readouterr().out.splitlines() == [
        "zbv: runs to its end on tagged channels",
        f"wrote {csv}",
        f"wrote {svg}",
        f"wrote {trace}",
    ]


def test_stages_may_differ_and_peaks_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    each = [
        part for number in range(1, 5) for part in ("--seconds", f"{number},{number},0,0", "--memory", f"{number},0")
    ]
    command.main(["GPipe", *COUNTS, *each])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"step {(1 + 2 + 3 + 4 + 5 * 4) * 2} s, bubble 50.0%"
    assert printed[-1] == "peak bytes: 6, 12, 18, 24"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1F1C", *COUNTS], "schedule name is '1f1c'"),
        (["1F1B", *COUNTS, "--seconds", "1,2"], "seconds has 2 numbers for a stage, expected 4"),
        (["1F1B", *COUNTS, "--seconds", "1,x"], "argument --seconds"),
        (["1F1B", *COUNTS, "--memory", "1,0", "--memory", "1,0"], "--memory was given 2 times"),
        (["1F1B", *COUNTS, "--validate", "pigeon"], "argument --validate"),
        (["1F1B", *COUNTS, "--svg", "/no/such/folder/step.svg"], "/no/such/folder"),
    ],
)
def test_it_says_what_is_wrong(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert expected.lower() in capsys.readouterr().err.lower()
