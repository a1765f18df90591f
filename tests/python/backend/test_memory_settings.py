"""What a group maps is what docs/settings.md says, and its settings hold."""

import os
import random
import re

import pytest
import torch
import torch.distributed as dist

from backend.test_collectives import _movement, _reductions
from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("it is about the host's memory")

KIB = 1 << 10


def _mapped(name):
    """Bytes of each mapping of a memfd of this name."""
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if f"/memfd:{name} " in line]
    bounds = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    return [end - begin for begin, end in bounds]


def _maps(rank, world_size, groups):
    made = [dist.new_group() for _ in range(groups)]
    for group in (None, *made):
        dist.all_reduce(torch.ones(200_000), group=group)
        dist.all_to_all_single(torch.zeros(world_size * 1000), torch.zeros(world_size * 1000), group=group)
    mapped = _mapped("farandole-group"), _mapped("farandole-ring")
    dist.barrier()
    while made:
        dist.destroy_process_group(made.pop())
    del group  # the memory goes with the last who knows the group
    return *mapped, len(_mapped("farandole-group"))


@pytest.mark.parametrize(
    ("world_size", "window", "ring"), [(2, None, None), (3, "24K", "64K"), (4, "8200", "256K"), (2, "1M", None)]
)
def test_groups_map_what_the_page_of_settings_says(world_size, window, ring):
    env = {"FARANDOLE_SHM_WINDOW_BYTES": window, "FARANDOLE_SHM_RING_BYTES": ring}
    env = {name: value for name, value in env.items() if value is not None}
    window_bytes = {None: 128 * KIB, "24K": 24 * KIB, "8200": 8 * KIB, "1M": 1024 * KIB}[window]
    ring_bytes = {None: 128 * KIB, "64K": 64 * KIB, "256K": 256 * KIB}[ring]
    for groups, rings, left in run_ranks(_maps, world_size, "farandole", env=env, groups=3):
        assert len(groups) == 4 and left == 1
        expected = world_size * (132 * KIB + 4.5 * window_bytes + 2.3 * KIB)
        assert all(abs(size - expected) <= 4 * KIB for size in groups), (groups, expected)
        assert len(rings) == 2 * (world_size - 1)
        assert all(abs(size - ring_bytes - 17.2 * KIB) <= 4 * KIB for size in rings), rings


def _set_own_window(rank):
    os.environ["FARANDOLE_SHM_WINDOW_BYTES"] = ["56K", "8K", "2M"][rank]


def _compute(rank, world_size, seed):
    return _reductions(rank, world_size, seed, 60) and _movement(rank, world_size, seed, 60), _mapped("farandole-group")


@pytest.mark.parametrize("window", ["8K", "40K", "1M", "other on each rank"])
def test_collectives_are_right_with_windows_of_any_size(window):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    differs = window.startswith("other")
    outcomes = run_ranks(
        _compute,
        3,
        "farandole",
        timeout=120,
        env={} if differs else {"FARANDOLE_SHM_WINDOW_BYTES": window},
        enter=_set_own_window if differs else None,
        seed=seed,
    )
    assert all(done for done, _ in outcomes)
    assert all(sizes == outcomes[0][1] for _, sizes in outcomes)


def _refused(rank, world_size):
    with pytest.raises((ValueError, RuntimeError)) as error:
        dist.init_process_group("farandole", rank=rank, world_size=world_size, store=dist.HashStore())
        dist.all_reduce(torch.ones(1))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FARANDOLE_SHM_WINDOW_BYTES", "4K", "from 8192 to 67108864"),
        ("FARANDOLE_SHM_WINDOW_BYTES", "some", "from 8192 to 67108864"),
        ("FARANDOLE_SCRATCH_BYTES", "-1", "from 0 to 1099511627776"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(name, value, expected):
    (message,) = run_ranks(_refused, 1, None, env={name: value})
    assert re.search(rf"{name} is '{value}'; expected a number of bytes {expected}", message), message
