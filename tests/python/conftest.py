"""Makes tests/python importable, so that tests and the ranks they start share ``support``."""

import os
import sys
from pathlib import Path

# For a dump with stack traces torch 2.15 imports half of itself, for seconds, at the first failure of every rank.
os.environ.setdefault("TORCH_INCLUDE_STACK_TRACE", "0")

sys.path.insert(0, str(Path(__file__).parent))

from support.sampling import pytest_addoption, pytest_collection_modifyitems, pytest_configure, pytest_report_header
from support.sanitizers import no_sanitizer_reports

__all__ = [
    "no_sanitizer_reports",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
]
