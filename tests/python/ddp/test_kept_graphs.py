"""A graph that is older than a step: what it has kept of parameters is not what they are, so that its backward raises, as
under torch's optimizers."""

from typing import Any

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE
from support.processes import run_ranks

SHARDED = {"use_distributed_optimizer": True, "bucket_size": 1}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unsharded": ({}, {}),
    "float32": ({"grad_reduce_in_fp32": True}, {}),
    "sharded": (SHARDED, {}),
    "overlapping": ({**SHARDED, "overlap_param_gather": True}, {}),
    "in parts": (SHARDED, {"overlap_param_gather_with_optimizer_step": True}),
    "whole": (SHARDED, {"is_elementwise": False}),
}


def _differentiate_late(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    for_model, for_optimizer = KINDS[kind]
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)).to(DEVICE, dtype)
    model = DistributedDataParallel(module, unused_parameters="skip", **for_model)
    halves = [DistributedOptimizer(torch.optim.AdamW(half.parameters()), model, **for_optimizer) for half in module]
    x = torch.ones(4, 6, device=DEVICE, dtype=dtype)

    def step(optimizer: torch.optim.Optimizer) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        model.zero_grad()

    for _ in range(2):
        step(halves[0])
    needs_no_weight = model(x).square().mean()
    step(halves[0])  # of whose weights autograd keeps none: x has no gradient
    needs_no_weight.backward()
    model.zero_grad()
    needs_weight = model(x).square().mean()
    step(halves[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        needs_weight.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_its_backward_raises_where_it_needs_what_was_stepped(kind, dtype):
    run_ranks(_differentiate_late, 2, "farandole", kind=kind, dtype=dtype)
