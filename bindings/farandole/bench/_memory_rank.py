"""A rank of the data-parallel benchmark: the memory of a model that is trained with a distributed optimizer."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.autograd.profiler import profile

from farandole.bench._ranks import Rank
from farandole.ddp import DistributedDataParallel, DistributedOptimizer

_WIDTH, _LAYERS = 1024, 4


def bytes_per_element(rank: Rank, grads_in_fp32: bool) -> float:
    """Runs on all ranks: what torch has allocated and not freed since before the model was made, by parameter element.

    Parameters are bfloat16, the optimizer is Adam; at a moment when all is there: after a backward that is not the
    first one, when the optimizer has its gradients.
    """
    torch.set_num_threads(1)
    gc.collect()  # the model before, whose end would count as less
    with profile(profile_memory=True) as allocations:
        module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, dtype=torch.bfloat16) for _ in range(_LAYERS)))
        model = DistributedDataParallel(
            module,
            process_group=rank.groups["farandole"],
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=grads_in_fp32,
        )
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        for step in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, _WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.grad_norm()
            if step == 0:
                optimizer.step()
    results = allocations.kineto_results
    assert results is not None
    held = sum(event.nbytes() for event in results.events() if event.name() == "[memory]")
    return held / sum(parameter.numel() for parameter in module.parameters())
