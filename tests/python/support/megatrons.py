"""The versions of Megatron-core that farandole.megatron is compared with, each in ranks of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.bench._megatron_core import FOLDER

_INSTALLED, _NEWER = "0.16.1", "0.19.0"
_FOLDER = Path(sys.prefix) / f"megatron-core-{_NEWER}"

# Gives a test ``version``.
every_megatron = pytest.mark.parametrize(
    "version",
    [
        _INSTALLED,
        pytest.param(
            _NEWER, marks=pytest.mark.skipif(not _FOLDER.is_dir(), reason=f"there is no {_FOLDER}, which ./dev makes")
        ),
    ],
)


def environment_of(version: str) -> dict[str, str]:
    """What a rank needs to import it."""
    return {} if version == _INSTALLED else {FOLDER: str(_FOLDER)}


def check_version(version: str) -> None:
    """In a rank that has imported it: that it is the one."""
    from megatron.core import __version__

    assert __version__.partition("+")[0] == version  # it adds the commit of whatever checkout the process runs in
