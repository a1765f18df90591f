"""Random models: inputs that are computed ahead of forward are those that forward has."""

from __future__ import annotations

import copy

import pytest
import torch
from input_models import Batch, RandomModel, computed, same, watched

from farandole.sparse._input_graph import InputGraph, trace_inputs
from farandole.sparse._post_processing import PostProcessing
from farandole.sparse._sharded import is_sharded
from support.devices import only_on_cpu

pytestmark = only_on_cpu("inputs are found without a device")


@pytest.mark.parametrize("seed", range(80))
def test_what_depends_on_the_batch_alone_is_pipelined_and_nothing_else(seed: int) -> None:
    model = RandomModel(seed)
    graph = trace_inputs(model, is_sharded)
    told = "\n".join(map(str, graph.verdicts))
    assert set(graph.names) == model.pipelined(), f"seed {seed}\n{model.program}\n{told}"
    assert [verdict.module for verdict in graph.verdicts] == [f"sharded.{i}" for i in range(len(model.sharded))]
    _compare(model, graph, seed)


@pytest.mark.parametrize("seed", range(160))
def test_inputs_are_right_whatever_is_written_in_place(seed: int) -> None:
    model = RandomModel(seed, in_place=True)
    _compare(model, trace_inputs(model, is_sharded), seed)


def _compare(model: RandomModel, graph: InputGraph, seed: int) -> None:
    """Three batches, each computed ahead while the one before waits for its forward; and a model that never does."""
    plain = copy.deepcopy(model)
    batches = [Batch(seed) for seed in range(3)]
    post = PostProcessing(model, graph.post_processing)
    ahead = computed(graph, post, batches[0])
    for index in range(3):
        calls, results = copy.deepcopy(ahead[0]), ahead[1]
        if index < 2:
            ahead = computed(graph, post, batches[index + 1])
        with watched(plain, graph.names) as expected:
            torch.manual_seed(seed)
            loss = plain(Batch(index))
        for name, call in zip(graph.names, calls):
            assert same([call], expected[name]), f"seed {seed} batch {index} {name}\n{model.program}"
        with post.replaying(results), watched(model, graph.names) as seen:
            torch.manual_seed(seed)
            assert torch.equal(model(batches[index]), loss), f"seed {seed} batch {index}\n{model.program}"
        assert seen.keys() == expected.keys() and all(same(seen[name], expected[name]) for name in seen)
    post.close()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), f"seed {seed} {name}"
