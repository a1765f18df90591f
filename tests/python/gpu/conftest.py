"""The worlds that tests of CUDA tensors run in."""

from collections.abc import Callable

import pytest

from farandole.bench._gpus import Placement, several_ranks


def _several(record_property: Callable[[str, object], None]) -> Placement:
    placement = several_ranks()
    if isinstance(placement, str):
        pytest.skip(placement)
    record_property("placement", str(placement))
    print(placement)
    return placement


@pytest.fixture(params=["one", "several"])
def world(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Placement:
    """One rank, and several: on a GPU each, or on one where NCCL can be had to share it."""
    return Placement(1) if request.param == "one" else _several(record_property)


@pytest.fixture
def peers(record_property: Callable[[str, object], None]) -> Placement:
    """Several ranks."""
    return _several(record_property)
