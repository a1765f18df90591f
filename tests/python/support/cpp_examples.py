"""The examples in C++, where they are built."""

from __future__ import annotations

from pathlib import Path

import pytest

import farandole

BUILD = Path(farandole.__file__).parents[2]


def _is_built() -> bool:
    cache = BUILD / "CMakeCache.txt"
    return cache.is_file() and "FARANDOLE_EXAMPLES:BOOL=ON" in cache.read_text()


needs_examples = pytest.mark.skipif(not _is_built(), reason="needs a build with FARANDOLE_EXAMPLES=ON")


def program(name: str) -> Path:
    return BUILD / "examples" / name
