"""Ranks that torchrun starts, and starts again in the same store."""

import pathlib
import re
import sys

import pytest

from support.devices import only_on_cpu
from support.launchers import by_torchrun

pytestmark = [only_on_cpu("it is about how ranks meet"), pytest.mark.timeout(180)]

SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist

attempt, deaths = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(sys.argv[1])
dist.init_process_group("farandole")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
outer = dist.new_group([0, size - 1])
if attempt < deaths and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt < deaths:
    dist.recv(torch.zeros(1), 1)
dist.barrier()
print(f"attempt {attempt}: rank {rank} has {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


def run(folder: pathlib.Path, deaths: int, restarts: int) -> tuple[int, list[str], str]:
    """How torchrun has ended, what the ranks have said, and all that was written."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    code, output = by_torchrun(3, sys.executable, str(script), str(deaths), restarts=restarts)
    return code, sorted(re.findall(r"attempt .*", output)), output


@pytest.mark.parametrize("deaths", [0, 2])
def test_ranks_meet_each_time_that_they_are_started(tmp_path, deaths):
    code, said, output = run(tmp_path, deaths, restarts=deaths)
    assert code == 0, output
    assert said == [f"attempt {deaths}: rank {rank} has 6.0" for rank in range(3)]


def test_when_no_restart_is_left_the_others_have_said_who_died(tmp_path):
    code, said, output = run(tmp_path, deaths=2, restarts=1)
    assert code != 0 and said == []
    # torchrun has seen the death, too, and ends those that are not fast enough.
    assert re.search(r"DistBackendError.*rank 1 \(", output), output
