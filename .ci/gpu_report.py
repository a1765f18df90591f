"""What ran on the GPU, what did not and why: from JUnit reports, as a table and as JSON.

usage: gpu_report.py REPORTS [--probe JSON]

Reads ctest.xml, pytest/*.xml and pytest-on-gpus/*.xml in the folder REPORTS, and bench.json, as far as they are there;
writes figures.json and prints it, too. Figures are what tests note with pytest's record_property. Fails when a test
failed, or when none of a report ran.
"""

import argparse
import collections
import json
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

OUTCOMES = ("passed", "failed", "skipped")


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    """passed, failed or skipped; and why."""
    for tag in ("failure", "error"):
        if (found := case.find(tag)) is not None:
            return "failed", first_line(found.get("message") or found.text or "")
    if case.get("status") == "fail":
        return "failed", ""
    if (found := case.find("skipped")) is not None:
        # ctest tells the reason in the test's output only; GoogleTest's is the line after "Skipped".
        said = re.search(r"Skipped\n(.+)", case.findtext("system-out") or "")
        return "skipped", said.group(1).strip() if said else first_line(found.get("message") or "")
    return "passed", ""


def first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def part_of(report: str, case: ElementTree.Element) -> str:
    """The row of a case: folder and module of a Python test, the suite of a C++ test."""
    if report != "ctest":
        return ".".join((case.get("classname") or "collection").rsplit(".", 2)[-2:])
    return (case.get("name") or "").split(".", 1)[0]


def collect(reports: pathlib.Path) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    failures, figures, placements = {}, {}, set()
    files = [("ctest", file) for file in reports.glob("ctest.xml")]
    files += [(name, file) for name in ("pytest", "pytest-on-gpus") for file in sorted(reports.glob(f"{name}/*.xml"))]
    for name, file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            outcome, why = outcome_of(case)
            label = f"{name}: {part_of(name, case)}"
            part = parts.setdefault(label, dict.fromkeys(OUTCOMES, 0) | {"seconds": 0.0})
            part[outcome] += 1
            part["seconds"] = round(part["seconds"] + float(case.get("time") or 0), 3)
            if outcome == "skipped":
                reasons[why] += 1
            elif outcome == "failed":
                failures[f"{label}: {case.get('name')}"] = why
            noted = {one.get("name"): one.get("value") for one in case.findall("properties/property")}
            if "placement" in noted:
                placements.add(noted.pop("placement"))
            if name != "ctest" and noted:
                figures[case.get("name")] = noted
    document: dict[str, Any] = {
        "parts": parts, "skipped": dict(reasons), "failures": failures, "several ranks": sorted(placements), "figures": figures,
    }  # fmt: skip
    if (reports / "bench.json").is_file():
        document["bench"] = medians(json.loads((reports / "bench.json").read_text()))
    return document


def medians(bench: dict[str, Any]) -> dict[str, Any]:
    """Of ./dev bench: for each case the medians, in seconds, and the ratios; every sample is in bench.json."""
    result: dict[str, Any] = dict(bench["skipped"])
    for subject in bench["subjects"]:
        for one in subject["series"]:
            result.setdefault(one["case"], {})[f"{one['peer']} {one['quantity']}"] = one["median"]
        for one in subject["ratios"]:
            result.setdefault(one["case"], {})[one["name"]] = one["median"]
        result |= {"notes": subject["notes"]} if subject["notes"] else {}
    return result


def show(document: dict[str, Any]) -> None:
    rows = [
        (name, *(part[outcome] for outcome in OUTCOMES), f"{part['seconds']:.1f}")
        for name, part in document["parts"].items()
    ]
    width = max([4, *(len(row[0]) for row in rows)])
    print(f"\n{'part':{width}}  {'passed':>6}  {'failed':>6}  {'skipped':>7}  {'seconds':>7}")
    for name, passed, failed, skipped, seconds in rows:
        print(f"{name:{width}}  {passed:6}  {failed:6}  {skipped:7}  {seconds:>7}")
    for placement in document["several ranks"]:
        print(f"\nseveral ranks: {placement}")
    for title in ("skipped", "failures"):
        if document[title]:
            print(f"\n{title}")
        for name, value in document[title].items():
            print(f"  {value:4}  {name}" if title == "skipped" else f"  {name}: {value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=pathlib.Path)
    parser.add_argument("--probe", default="{}", help="what gpu_probe.py has printed")
    options = parser.parse_args()
    document = {"machine": json.loads(options.probe)} | collect(options.reports)
    show(document)
    text = json.dumps(document, indent=1)
    (options.reports / "figures.json").write_text(text + "\n")
    print(f"\n{text}")
    return 0 if good(document) else 1


def good(document: dict[str, Any]) -> bool:
    """Nothing failed, and of each report something ran: where there is a GPU, not all can be skipped."""
    passed: collections.Counter[str] = collections.Counter()
    for name, part in document["parts"].items():
        passed[name.split(":")[0]] += part["passed"]
    return bool(passed) and all(passed.values()) and not document["failures"]


if __name__ == "__main__":
    sys.exit(main())
