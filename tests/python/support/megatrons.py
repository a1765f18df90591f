"""The versions of Megatron-core that farandole.megatron is compared with, each in ranks of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from farandole.bench import _megatron_core
from farandole.bench._megatron_core import FOLDER
from support.devices import ON_CPU

_INSTALLED, _NEWER = "0.16.1", "0.19.0"
_FOLDER = Path(sys.prefix) / f"megatron-core-{_NEWER}"

# ./dev installs it; a machine for GPU tests may have no registry.
needs_megatron = pytest.mark.skipif(
    not ON_CPU and importlib.util.find_spec("megatron") is None, reason=f"Megatron-core {_INSTALLED} is not installed"
)

# Gives a test ``version``.
every_megatron = pytest.mark.parametrize(
    "version",
    [
        pytest.param(_INSTALLED, marks=needs_megatron),
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


def import_schedules() -> Any:
    """``megatron.core.pipeline_parallel.schedules``, for tensors on the tests' device."""
    return _megatron_core.import_schedules() if ON_CPU else _import_as_it_is("pipeline_parallel.schedules")


def import_distributed() -> Any:
    """``megatron.core.distributed``, for tensors on the tests' device."""
    return _megatron_core.import_distributed() if ON_CPU else _import_as_it_is("distributed")


def cases(count: int) -> int:
    """Of a random test: fewer on a GPU, which ranks share, and where new groups take long to connect."""
    return count if ON_CPU else max(1, count // 5)


def _import_as_it_is(name: str) -> Any:
    _megatron_core.find()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else it would use
        return importlib.import_module(f"megatron.core.{name}")
