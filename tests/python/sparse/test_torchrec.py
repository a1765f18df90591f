"""Models of torchrec through the pipeline are those of the plain loop, bit for bit."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import Loader, Trouble, drain, drain_with_errors, plain_loop

pytestmark = needs_torchrec


def compare_randomly(
    rank: int, world_size: int, seed: int, cases: int, is_even: bool, windows: tuple[int, int] | None = None
) -> None:
    import torchrec_models as models

    pick = random.Random(seed)
    for case in range(cases):
        threads = (False, True, None)[case % 3]
        kind, number, grad_accum = models.random_kind(pick), pick.randint(1, 8), pick.choice([None, None, 2, 3])
        number, grad_accum = windows or (number, grad_accum)
        print(f"seed {seed}: threads {threads}, {kind}, {number} batches, grad_accum {grad_accum}")
        (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
        plain.load_state_dict(model.state_dict())
        options: Any = {"load_on_thread": threads, "dist_on_thread": threads, "strict": True}
        pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, grad_accum=grad_accum, **options)
        names = ("first", "second", "third")[: 3 if kind.sequences else 2]
        assert pipeline.explain() == "\n".join(f"{name}: pipelined" for name in names)
        for epoch in range(2):
            batches = models.make_batches(kind, kind.seed + epoch, number, is_even)
            again = models.make_batches(kind, kind.seed + epoch, number, is_even)  # processors write to their inputs
            expected = plain_loop(plain, plain_optimizer, again, grad_accum or 1)
            outputs = drain(pipeline, iter(batches))
            assert len(outputs) == number and all(map(torch.equal, outputs, expected))
            theirs = models.weights(plain)
            for name, value in models.weights(model).items():
                assert torch.equal(value, theirs[name]), name
        pipeline.detach()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trains_as_the_plain_loop(world_size):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(compare_randomly, world_size, "farandole", timeout=200, seed=seed, cases=9, is_even=False)


def test_a_first_window_that_the_data_cuts_short():
    # torch's DDP with a static graph has synchronized its first backward: the gradients are views of its buckets then,
    # which it divides by 3, where it multiplies others by a third.
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(compare_randomly, 3, "farandole", timeout=200, seed=seed, cases=2, is_even=False, windows=(2, 3))


def test_trains_as_the_plain_loop_over_gloo():
    # Batches of other sizes on other ranks are more than torchrec can do over gloo.
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(compare_randomly, 2, "gloo", timeout=200, seed=seed, cases=3, is_even=True)


def refuse_dense(rank: int, world_size: int) -> None:
    import torchrec_models as models

    kind = models.Kind(("table",), ("table", "data"), "plain", False, False, 1)
    model, optimizer = models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU)
    with pytest.raises(ValueError, match=r"third: tables u1 of an EmbeddingCollection have compute_kernel='dense'"):
        pipeline.progress(iter(models.make_batches(kind, 1, 1)))


def test_a_kernel_that_pools_what_is_not_to_be_pooled_is_refused():
    run_ranks(refuse_dense, 2, "farandole")


def end_and_fail(rank: int, world_size: int, seed: int) -> None:
    """Ranks with different numbers of batches, one of which fails on one rank; also where that is the second one."""
    import torchrec_models as models

    pick = random.Random(seed)
    for case in range(8):
        threads = (False, True)[case % 2]
        kind = models.random_kind(pick)
        numbers = [5, pick.randint(0, 5)] if case < 4 else [5, 5]
        fails = None if case < 4 else (pick.randrange(2), 1 if case < 6 else pick.randrange(5))  # rank, batch
        print(f"seed {seed}: threads {threads}, {kind}, {numbers} batches, fails {fails}")
        (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
        plain.load_state_dict(model.state_dict())
        pipeline = TrainPipelineSparseDist(
            model, optimizer, models.CPU, load_on_thread=threads, dist_on_thread=threads, strict=True
        )
        for epoch in range(2):
            batches = models.make_batches(kind, kind.seed + epoch, numbers[rank])
            again = models.make_batches(kind, kind.seed + epoch, numbers[rank])
            failing = {fails[1]} if fails is not None and fails[0] == rank else set()
            seen = drain_with_errors(pipeline, Loader(batches, failing))
            trained = again[: min(numbers)]
            if fails is not None:
                assert isinstance(seen.pop(fails[1]), Trouble if rank == fails[0] else RuntimeError)
                del trained[fails[1]]
            expected = plain_loop(plain, plain_optimizer, trained)
            assert len(seen) == len(expected) and all(map(torch.equal, seen, expected))
        pipeline.detach()


def test_ranks_end_and_fail_together():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(end_and_fail, 2, "farandole", timeout=200, seed=seed)


STAGES = {
    "## zero_grad ##",
    "## wait_for_batch ##",
    "## start_sparse_data_dist ##",
    "## copy_batch_to_gpu ##",
    "## next_batch ##",
    "## load batch from dataloader (host) ##",
    "## load_batch ##",
    "## forward ##",
    "## wait_sparse_data_dist ##",
    "## sharded_module_prefetch ##",
    "## backward ##",
    "## optimizer ##",
}
# Classes, and names that torchrec's have elsewhere: on a thread that the profiler does not see; and in the prefetch of
# tables without caches, which ours wait for in the forward.
UNLIKE: dict[str, set[str]] = {
    "TrainPipelineBase": set(),
    "TrainPipelineSparseDist": set(),
    "PrefetchTrainPipelineSparseDist": {"## wait_sparse_data_dist ##"},
    "EvalPipelineSparseDist": {"## load_batch ##", "## copy_batch_to_gpu ##"},
}


def ranges_of(pipeline: Any, batches: Any, names: set[str]) -> list[str]:
    """Of three steps in the midst of an epoch, by time; those that have these names, but for the number of a batch."""
    for _ in range(2):
        pipeline.progress(batches)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            pipeline.progress(batches)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if re.sub(r" \d+\b", "", event.name) in names]


def name_events(rank: int, world_size: int, kind: str) -> None:
    import torchrec_models as models
    from torchrec.distributed import train_pipeline

    from farandole import sparse

    of_model = models.random_kind(random.Random(7))
    names = []
    inline = {"load_on_thread": False} | ({} if kind == "TrainPipelineBase" else {"dist_on_thread": False})
    for library, options in ((train_pipeline, {}), (sparse, inline)):
        model, optimizer = models.made(of_model)
        pipeline: Any = getattr(library, kind)(model, optimizer, models.CPU, **options)
        batches = iter([models.Movable(**vars(batch)) for batch in models.make_batches(of_model, 1, 8)])
        names.append(ranges_of(pipeline, batches, STAGES - UNLIKE[kind]))
    theirs, ours = names
    assert sorted(theirs) == sorted(ours), (theirs, ours)
    if kind == "TrainPipelineSparseDist":
        # torchrec's forward waits for the data of its two modules; here the step before does, after its backward.
        moved = "## wait_sparse_data_dist ##"
        assert len(theirs) == 3 * 11
        assert [name for name in theirs if name != moved] == [name for name in ours if name != moved]


@pytest.mark.filterwarnings("ignore:no sharded module has a cache")
@pytest.mark.parametrize("kind", UNLIKE)
def test_events_have_torchrecs_names(kind):
    run_ranks(name_events, 2, "farandole", timeout=120, kind=kind)


def hook_backwards(rank: int, world_size: int) -> None:
    import torchrec_models as models
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as TorchrecPipeline
    from torchrec.distributed.train_pipeline.backward_injection import InjectionSite, OutputDistSite
    from torchrec.distributed.types import ShardingType

    kind = models.Kind(("table", "row"), ("table",), "plain", False, False, 3)
    results = []
    for make in (TrainPipelineSparseDist, TorchrecPipeline):
        model, optimizer = models.made(kind)
        pipeline: Any = make(model, optimizer, models.CPU)
        calls: list[str] = []

        def work(name: str, pipeline: Any = pipeline, calls: Any = calls) -> Any:
            def note(given: Any) -> None:
                assert given is pipeline
                given._optimizer.step()  # with what the backward has by then
                calls.append(name)

            return note

        pipeline.register_backward_hook(OutputDistSite("first", sharding_type=ShardingType.ROW_WISE), work("first"))
        pipeline.register_backward_hook(InjectionSite("top"), work("top"))
        with pytest.raises(ValueError, match="'bottom_' not found"):
            pipeline.register_backward_hook(InjectionSite("bottom_"), work("bottom_"))
        batches = [models.Movable(**vars(batch)) for batch in models.make_batches(kind, 1, 4)]
        outputs = drain(pipeline, iter(batches))
        pipeline.detach()
        assert calls == ["top", "first"] * 4
        results.append((outputs, models.weights(model)))
    (outputs, weights), (expected, theirs) = results
    assert all(map(torch.equal, outputs, expected)) and len(outputs) == 4
    assert all(torch.equal(value, theirs[name]) for name, value in weights.items())


def test_work_in_the_backward_is_done_where_torchrecs_does_it():
    run_ranks(hook_backwards, 2, "farandole", timeout=120)


def compile_dense(rank: int, world_size: int) -> None:
    import torchrec_models as models

    kind = models.Kind(("table", "row"), ("table",), "plain", False, False, 4)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    plain.load_state_dict(model.state_dict())
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model.module.top = torch.compile(model.module.top, backend=backend)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    outputs = drain(pipeline, iter(models.make_batches(kind, 1, 4)))
    expected = plain_loop(plain, plain_optimizer, models.make_batches(kind, 1, 4))
    assert graphs and len(outputs) == 4 and all(map(torch.equal, outputs, expected))
    theirs = models.weights(plain)
    for name, value in models.weights(model).items():
        assert torch.equal(value, theirs[name.replace("_orig_mod.", "")]), name


def test_dense_modules_may_be_compiled():
    run_ranks(compile_dense, 2, "farandole", timeout=120)


def accumulate(rank: int, world_size: int, seed: int) -> None:
    """torchrec's wrapper does not divide losses, and steps the last window, where it is not full, without averaging."""
    import torchrec_models as models
    from torchrec.distributed.train_pipeline import GradientAccumulationConfig, GradientAccumulationWrapper
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as TorchrecPipeline

    pick = random.Random(seed)
    for size in (2, 3):
        kind = models.random_kind(pick)
        print(f"seed {seed}: windows of {size}, {kind}")
        (model, optimizer), (theirs, their_optimizer) = models.made(kind), models.made(kind)
        theirs.load_state_dict(model.state_dict())

        def divided(batch: Any, model: Any = theirs, size: int = size) -> Any:
            losses, output = model(batch)
            return losses / size, output

        pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, grad_accum=size, strict=True)
        wrapped: Any = GradientAccumulationWrapper(
            TorchrecPipeline(theirs, their_optimizer, models.CPU, custom_model_fwd=divided),
            their_optimizer,
            theirs,
            GradientAccumulationConfig(num_steps=size),
        )
        batches, again = (
            [models.Movable(**vars(batch)) for batch in models.make_batches(kind, seed, 3 * size)] for _ in range(2)
        )
        assert all(map(torch.equal, drain(pipeline, iter(batches)), drain(wrapped, iter(again))))
        expected = models.weights(theirs)
        for name, value in models.weights(model).items():
            assert torch.equal(value, expected[name]), name


def test_full_windows_are_those_of_torchrecs_wrapper():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(accumulate, 2, "farandole", timeout=120, seed=seed)
