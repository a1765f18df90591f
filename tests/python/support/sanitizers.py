"""Sanitizers write their reports, from any process, to files ``sanitizer.*`` in the folder FARANDOLE_SANITIZER_REPORTS:
the test in which a new one appears fails.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = "FARANDOLE_SANITIZER_REPORTS"
SANITIZED = FOLDER in os.environ


def _reports() -> set[Path]:
    return set(Path(os.environ[FOLDER]).glob("sanitizer.*")) if SANITIZED else set()


@pytest.fixture(autouse=True)
def no_sanitizer_reports() -> Iterator[None]:
    earlier = _reports()
    yield
    new = sorted(_reports() - earlier)
    if new:
        pytest.fail("\n".join(report.read_text(errors="replace") for report in new), pytrace=False)
