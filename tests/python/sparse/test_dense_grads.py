"""Dense gradients are reduced once in a window of gradient accumulation, by whatever wrapper has them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFsdp
from torch.nn.parallel import DistributedDataParallel as TorchsDdp

from farandole.ddp import DistributedDataParallel as OurDdp
from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks
from support.recommenders import Recommender, assert_same, drain, make_batches, on_device, plain_loop


class WithHead(Recommender):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, tables=2)
        self.head = nn.Linear(1, 1)

    def score(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.dense(features)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none"), scores.detach()


def wrapped(how: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its wrappers, by name."""
    inner = WithHead(3)
    model: nn.Module = inner
    wrappers: dict[str, Any] = {}
    if "dense" in how:
        wrappers["dense"] = inner.dense = (OurDdp if "ours" in how else TorchsDdp)(inner.dense)
        wrappers["head"] = inner.head = (OurDdp if "ours" in how else TorchsDdp)(inner.head)
    if "whole" in how:
        ignored = ("tables", "dense") if "dense" in how else ("tables",)
        if "dense" in how:
            inner.head = inner.head.module
            del wrappers["head"]
        names = [name for name, _ in inner.named_parameters() if name.startswith(ignored)]
        TorchsDdp._set_params_and_buffers_to_ignore_for_model(inner, names)
        wrappers["whole"] = model = TorchsDdp(inner)
    return model, wrappers


def count_reductions(rank: int, world_size: int, how: str, grad_accum: int) -> None:
    (model, wrappers), (plain, plain_wrappers) = wrapped(how), wrapped(how)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    counts: Counter[str] = Counter()

    def counted(name, bucket):  # torch would take these annotations for wrong ones
        counts[name] += 1
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    for name, wrapper in wrappers.items():
        wrapper.register_comm_hook(name, counted)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, grad_accum=grad_accum)
    batches = make_batches(1, 7)
    iterator, outputs = iter(batches), []
    for index in range(7):
        counts.clear()
        outputs.append(pipeline.progress(iterator))
        is_last = index % grad_accum == grad_accum - 1
        assert counts == dict.fromkeys(wrappers, 1) if is_last else not counts, (index, counts)
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    for index, batch in enumerate(batches):
        is_last = index % grad_accum == grad_accum - 1 or index == 6
        if index % grad_accum == 0:
            plain_optimizer.zero_grad()
        for wrapper in plain_wrappers.values():
            wrapper.require_backward_grad_sync = is_last
        losses, output = plain(on_device(batch))
        torch.sum(losses / grad_accum, dim=0).backward()
        assert torch.equal(outputs[index], output), index
        if is_last:
            plain_optimizer.step()
    assert_same(model, plain)


@pytest.mark.sample(4)
@pytest.mark.parametrize("grad_accum", [1, 3])
@pytest.mark.parametrize(
    "how",
    ["none", "whole", "dense by torch's", "dense by ours", "whole and dense by torch's", "whole and dense by ours"],
)
def test_gradients_are_reduced_once_in_a_window(how, grad_accum):
    run_ranks(count_reductions, 2, "farandole", how=how, grad_accum=grad_accum)


def begin_elsewhere(rank: int, world_size: int) -> None:
    """Steps without a pipeline have had the backward that a static graph needs."""
    models, optimizers = [], []
    for _ in range(2):
        inner = Recommender(3)
        names = [name for name, _ in inner.named_parameters() if name.startswith("tables")]
        TorchsDdp._set_params_and_buffers_to_ignore_for_model(inner, names)
        models.append(TorchsDdp(inner, static_graph=True))
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.5))
        plain_loop(models[-1], optimizers[-1], make_batches(2, 2))
    batches = make_batches(1, 6)
    pipeline = TrainPipelineSparseDist(models[0], optimizers[0], DEVICE, strict=True, grad_accum=3)
    outputs = drain(pipeline, iter(batches))
    assert all(map(torch.equal, outputs, plain_loop(models[1], optimizers[1], batches, 3)))
    assert_same(*models)


def test_a_static_graph_that_has_begun_elsewhere_is_reduced_once_in_its_first_window():
    run_ranks(begin_elsewhere, 2, "farandole")


def cut_with_fsdp(rank: int, world_size: int) -> None:
    """torch's first one has its gradients summed in a backward only; what a window that is cut short has is not stepped."""
    models = [Recommender(3) for _ in range(2)]
    for model in models:
        model.tables.requires_grad_(False)
        model.dense = TorchsFsdp(model.dense, device_id=torch.device(DEVICE))
    optimizers = [torch.optim.SGD(model.dense.parameters(), lr=0.5) for model in models]
    pipeline = TrainPipelineSparseDist(models[0], optimizers[0], DEVICE, strict=True, grad_accum=3)
    for seed in range(2):
        batches = make_batches(seed, 5)
        iterator = iter(batches)
        outputs = [pipeline.progress(iterator) for _ in batches]
        with pytest.raises(NotImplementedError, match=r"FullyShardedDataParallel .* or execute_all_batches=False"):
            pipeline.progress(iterator)
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
        for index, batch in enumerate(batches):
            if index % 3 == 0:
                optimizers[1].zero_grad()
            with nullcontext() if index % 3 == 2 else models[1].dense.no_sync():
                losses, output = models[1](on_device(batch))
                torch.sum(losses / 3, dim=0).backward()
            if index % 3 == 2:
                optimizers[1].step()
            assert torch.equal(outputs[index], output), index
    assert_same(*models)


@only_on_cpu("FSDP moves its parameters to a GPU of each rank's own")
def test_a_window_that_is_cut_short_with_fsdp_says_so_and_ends():
    run_ranks(cut_with_fsdp, 2, "farandole")


def sum_up(_, bucket):  # torch would take these annotations for wrong ones
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def cut_with_hooks(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for hook in (sum_up, dist.BuiltinCommHookType.FP16_COMPRESS):
        models, optimizers = [], []
        for _ in range(2):
            inner = Recommender(3)
            names = [name for name, _ in inner.named_parameters() if name.startswith("tables")]
            TorchsDdp._set_params_and_buffers_to_ignore_for_model(inner, names)
            model = TorchsDdp(inner, **options)
            if callable(hook):
                model.register_comm_hook(None, hook)
            else:
                model._register_builtin_comm_hook(hook)
            models.append(model)
            optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        pipeline = TrainPipelineSparseDist(models[0], optimizers[0], DEVICE, strict=True, grad_accum=3)
        for number in (5, 4):
            batches = make_batches(number, number)
            outputs = drain(pipeline, iter(batches))
            assert all(map(torch.equal, outputs, plain_loop(models[1], optimizers[1], batches, 3))), hook
            assert_same(*models)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "views", "unused", "static"],
)
def test_a_window_that_is_cut_short_goes_through_torchs_hook(options):
    run_ranks(cut_with_hooks, 2, "farandole", options=options)
