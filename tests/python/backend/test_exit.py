"""How a process may end."""

import subprocess
import sys
import textwrap

import pytest
import torch

from support.devices import only_on_cpu
from support.torch_features import HAS_ABORT_HOOKS

pytestmark = only_on_cpu("tests/python/gpu/test_groups has it on GPUs")

SCRIPT = """
    import sys, torch, torch.distributed as dist
    rank = int(sys.argv[1])
    dist.init_process_group("farandole", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    x = torch.ones(10)
    dist.all_reduce(x)
    {pending}
    print("done", x[0].item(), flush=True)
    {end}
"""


def _run_both(folder, pending="", end=""):
    script = textwrap.dedent(SCRIPT).format(pending=pending, end=end)
    command = [sys.executable, "-c", "import farandole\n" + script]
    ranks = [
        subprocess.Popen([*command, str(r), str(folder / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]  # fmt: skip
    try:
        return [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_a_process_may_end_without_destroying_its_group(tmp_path):
    for output, errors, code in _run_both(tmp_path):
        assert (output, errors, code) == ("done 2.0\n", "", 0)


def test_a_process_may_end_with_operations_pending(tmp_path):
    pending = "works = [dist.irecv(torch.zeros(1), 1 - rank, tag=i) for i in range(5)]"
    for output, errors, code in _run_both(tmp_path, pending):
        assert (output, code) == ("done 2.0\n", 0)
        assert "Traceback" not in errors and "FATAL" not in errors, errors  # torch may tell that the other left


def test_an_exception_ends_the_process_with_its_traceback(tmp_path):
    for output, errors, code in _run_both(tmp_path, end="raise RuntimeError('own reasons')"):
        assert output == "done 2.0\n" and "own reasons" in errors and code == 1


SLOW_HOOK = """
import datetime, time
def dump():  # as torch's flight recorder does, which imports half of torch for it
    time.sleep(3)
    print("dumped", flush=True)
dist.group.WORLD._get_backend(torch.device("cpu")).register_abort_hook(7, dump)
started = time.monotonic()
try:
    dist.irecv(torch.zeros(1), 1 - rank, tag=1).wait(datetime.timedelta(seconds=0.2))
except RuntimeError as error:
    assert "not done after its timeout of 200 ms" in str(error), error
    assert time.monotonic() - started < 3
dist.barrier()  # not before both were told: who leaves ends what waits for him
"""


@pytest.mark.skipif(not HAS_ABORT_HOOKS, reason=f"torch {torch.__version__} has no such hooks")
def test_a_failure_does_not_wait_for_abort_hooks_but_the_end_of_the_process_does(tmp_path):
    for output, errors, code in _run_both(tmp_path, SLOW_HOOK):
        assert (output, code) == ("done 2.0\ndumped\n", 0), errors
