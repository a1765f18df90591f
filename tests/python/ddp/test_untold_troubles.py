"""What one rank has found where the others never come to be told: it says so, and the error has both."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from typing import Any

import pytest
import torch.distributed as dist
from ddp_models import BACKENDS
from told_layers import ALL, Layers, batch_of, trained, wrapped

from support.devices import only_on_cpu
from support.processes import await_all, run_ranks

_READ = r"rank 1 of the group: parameter 'layers\.2\.(weight|bias)' was read before other ranks'"


def _nobody_comes(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    model, optimizer = wrapped(Layers(), process_group=group)
    for step in range(2):
        optimizer.zero_grad()
        model(batch_of(step, rank)).square().mean().backward()
        optimizer.step()
    warned = ""
    if rank == 1:
        with tempfile.TemporaryFile("w+") as log:
            stderr = os.dup(2)
            os.dup2(log.fileno(), 2)
            begin = time.monotonic()
            try:
                with pytest.raises(RuntimeError, match=_READ) as raised:
                    model(batch_of(6, rank), ["call 0", "read 2"])
            finally:
                os.dup2(stderr, 2)
            assert 5 < time.monotonic() - begin < 40
            log.seek(0)
            warned = log.read()
        assert "The other ranks could not be told: the wait for them failed: " in str(raised.value)
    await_all(rank, world_size)
    return warned


@only_on_cpu("a wait for a device does not end by itself")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_waits_in_vain_to_tell_what_it_has_found_warns_and_raises_both(backend):
    warned = run_ranks(_nobody_comes, 2, backend, timeout=60)[1]
    assert warned.count("rank 1 of the group: parameter 'layers.2.") == 1, warned
    assert "has waited for 5 s for the others" in warned


def _gives_up(rank: int, world_size: int) -> None:
    """The others have given the group up meanwhile."""
    pair = trained(rank, world_size)
    if rank == 0:
        time.sleep(1)
        pair.model.abandon("out of memory")
    else:
        with pytest.raises(RuntimeError, match=_READ) as raised:
            pair.model(batch_of(6, rank), ["call 0", "read 2"])
        assert ": rank 0 abandoned the data-parallel group: out of memory" in str(raised.value)
    await_all(rank, world_size)


@only_on_cpu("a wait for a device does not end by itself")
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_are_said_where_the_group_was_given_up(backend):
    run_ranks(_gives_up, 2, backend, timeout=60)


def _slow(rank: int, world_size: int) -> None:
    pair: Any = trained(rank, world_size)
    pair.optimizer.zero_grad()
    if rank == 0:
        time.sleep(6)
    with pytest.raises(RuntimeError, match=_READ) as raised:
        pair.model(batch_of(6, rank), ["call 0", "read 2"] if rank == 1 else ALL).square().mean().backward()
    assert "could not be told" not in str(raised.value)
    pair.step((ALL,))
    await_all(rank, world_size)


@only_on_cpu("a wait for a device does not end by itself")
def test_where_the_others_come_late_all_are_told():
    run_ranks(_slow, 2, BACKENDS[-1], timeout=60)
