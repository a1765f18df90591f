"""What is refused, by name, before anything is issued: the group works on."""

import os
import re

import pytest
import torch
import torch.distributed as dist

from farandole.bench._gpus import Placement
from support.gpus import needs_gpu, needs_two_gpus, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
ERRORS = (ValueError, TypeError, RuntimeError)


def _works():
    x = torch.ones(16, device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 16


def _refuse_all(rank, world_size):
    """Case by case, what was said."""
    said = {}
    for case, (do, _) in CASES.items():
        _works()
        try:
            do(world_size)
            torch.cuda.synchronize()
        except ERRORS as error:
            said[case] = str(error)
        _works()
    return said


def _reduce_bits(op):
    return lambda n: dist.all_reduce(torch.ones(4, dtype=torch.int32, device="cuda"), op)


def _gather_into(device, count=None):
    def gather(n):
        outputs = [torch.zeros(4, device="cuda") for _ in range(n - 1 if count is None else count(n))]
        dist.all_gather([*outputs, torch.zeros(4, device=device)], torch.ones(4, device="cuda"))

    return gather


# What is done, and what its error must name.
CASES = {
    "BAND": (_reduce_bits(dist.ReduceOp.BAND), "BAND"),
    "BOR": (_reduce_bits(dist.ReduceOp.BOR), "BOR"),
    "BXOR": (_reduce_bits(dist.ReduceOp.BXOR), "BXOR"),
    "int16": (
        lambda n: dist.all_reduce(torch.ones(4, dtype=torch.int16, device="cuda")),
        "int16|Short",
    ),
    "reduce_scatter of int16": (
        lambda n: dist.reduce_scatter_tensor(
            torch.ones(4, dtype=torch.int16, device="cuda"), torch.ones(4 * n, dtype=torch.int16, device="cuda")
        ),
        "int16|Short",
    ),
    "a mean of bool": (
        lambda n: dist.all_reduce(torch.ones(4, dtype=torch.bool, device="cuda"), dist.ReduceOp.AVG),
        "AVG",
    ),
    "a list with a tensor of the CPU": (_gather_into("cpu"), "cpu|device"),
    "an output on the CPU": (
        lambda n: dist.all_gather_into_tensor(torch.zeros(4 * n), torch.ones(4, device="cuda")),
        "cpu|device",
    ),
    "too many outputs": (_gather_into("cuda", lambda n: n), r"\d"),
    "an output that is too small": (
        lambda n: dist.all_gather_into_tensor(torch.zeros(4 * n - 1, device="cuda"), torch.ones(4, device="cuda")),
        r"\d",
    ),
    "another dtype": (
        lambda n: dist.all_gather_into_tensor(
            torch.zeros(4 * n, dtype=torch.float64, device="cuda"), torch.ones(4, device="cuda")
        ),
        "dtype|type|float64|Double",
    ),
    "a tensor with gaps": (lambda n: dist.all_reduce(torch.ones(8, 8, device="cuda")[:, ::2]), "contiguous|dense"),
    "a sparse tensor of which only the sum is known": (
        lambda n: dist.all_reduce(torch.eye(4, device="cuda").to_sparse(), dist.ReduceOp.PRODUCT),
        "sparse|PRODUCT",
    ),
    "splits that do not add up": (
        lambda n: dist.all_to_all_single(
            torch.zeros(4 * n, device="cuda"), torch.ones(4 * n, device="cuda"), [3] * n, [4] * n
        ),
        r"\d|[Ss]plit",
    ),
}


@pytest.fixture(scope="module")
def said():
    (by_case,) = run_on_gpus(_refuse_all, Placement(1))
    return by_case


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_done_is_refused_by_name_and_the_group_works_on(said, case):
    assert case in said, "it was not refused"
    assert re.search(CASES[case][1], said[case]), said[case]


def _wrong_device(rank, world_size, folder):
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    device = torch.device("cuda", 0)
    dist.init_process_group("farandole", store=store, rank=rank, world_size=world_size, device_id=device)
    _works()
    with pytest.raises(ERRORS) as error:
        dist.all_reduce(torch.ones(4, device="cuda:1"))
    _works()
    dist.destroy_process_group()
    return str(error.value)


@needs_two_gpus
def test_a_tensor_on_another_device_than_the_groups_is_refused(tmp_path):
    (message,) = run_on_gpus(_wrong_device, Placement(1), backend=None, folder=str(tmp_path))
    assert "cuda:0" in message or "cuda:1" in message


def _mixed_devices(rank, world_size):
    _works()
    with pytest.raises(ERRORS) as error:
        dist.all_reduce_coalesced([torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")])
    _works()
    return str(error.value)


@needs_two_gpus
def test_a_list_of_tensors_on_two_devices_is_refused():
    (message,) = run_on_gpus(_mixed_devices, Placement(1))
    assert "device" in message
