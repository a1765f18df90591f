"""Prints the totals of JUnit reports; fails when a test failed or none ran.

usage: totals.py LABEL REPORT.xml...
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def count(report: pathlib.Path) -> dict[str, int]:
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
            totals["failed"] += 1
        elif case.find("skipped") is not None:
            totals["skipped"] += 1
        else:
            totals["passed"] += 1
    return totals


def main() -> int:
    good = True
    print(f"\ntotals ({sys.argv[1]})")
    for report in map(pathlib.Path, sys.argv[2:]):
        totals = count(report)
        good = good and totals["failed"] == 0 and totals["passed"] > 0
        print(f"  {report.stem:8}" + ", ".join(f"{number} {outcome}" for outcome, number in totals.items()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
