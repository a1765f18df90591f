"""The package's "hosts" on one machine, as tests use them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from farandole.bench import _namespaces
from farandole.bench._namespaces import INTERFACE

__all__ = ["INTERFACE", "Hosts", "PretendHost"]


class Hosts(_namespaces.Hosts):
    """Skips the test, with the reason, where the machine lacks something that is asked for."""

    def __init__(self, count: int, rate: str | None = None, delay: float | None = None) -> None:
        try:
            super().__init__(count, rate, delay)
        except _namespaces.NoHostsError as error:
            pytest.skip(str(error))


@dataclass(frozen=True)
class PretendHost:
    """For ``run_ranks(enter=...)``: ranks of different hosts are on one machine and network, and do not know it."""

    hosts: tuple[int, ...]

    def __call__(self, rank: int) -> None:
        os.environ["FARANDOLE_HOST_ID"] = f"host-{self.hosts[rank]}"
