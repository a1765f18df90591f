"""TrainPipelineSparseDist is the plain loop: outputs, losses and weights, bit for bit."""

from __future__ import annotations

import gc
import random
import types
import warnings
import weakref
from typing import Any

import pytest
import torch

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    Recommender,
    ShardedTables,
    assert_same,
    drain,
    is_exact,
    is_same,
    made,
    make_batches,
    on_device,
    plain_loop,
)

THREADS = {"inline": False, "threads": True, "as measured": None}


def with_adam(seed: int, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    # Adam makes whole steps of rounding errors.
    return made(Recommender(seed, **options), torch.optim.Adam if is_exact() else torch.optim.SGD, 0.05)


def train_randomly(rank: int, world_size: int, seed: int, cases: int, threads: bool | None) -> None:
    pick = random.Random(seed)
    for _ in range(cases):
        number, grad_accum, tables = pick.randint(0, 9), pick.choice([None, 1, 2, 3, 4]), pick.randint(1, 3)
        case = pick.randint(0, 1 << 30)
        print(f"seed {seed}: {number} batches, grad_accum {grad_accum}, {tables} tables, case {case}")
        (model, optimizer), (plain, plain_optimizer) = with_adam(case, tables=tables), with_adam(case, tables=tables)
        pipeline = TrainPipelineSparseDist(
            model, optimizer, DEVICE, grad_accum=grad_accum, load_on_thread=threads, dist_on_thread=threads, strict=True
        )
        for epoch in range(2):
            batches = make_batches(case + epoch, number)
            expected = plain_loop(plain, plain_optimizer, batches, grad_accum or 1)
            outputs = drain(pipeline, iter(batches))
            assert len(outputs) == len(expected)
            assert all(map(is_same, outputs, expected))
            assert_same(model, plain)
        pipeline.detach()


@pytest.mark.sample(6)
@pytest.mark.parametrize("threads", THREADS.values(), ids=THREADS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trains_as_the_plain_loop(world_size, threads):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(train_randomly, world_size, "farandole", timeout=120, seed=seed, cases=4, threads=threads)


def test_trains_as_the_plain_loop_over_gloo():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(train_randomly, 2, "gloo", timeout=120, seed=seed, cases=4, threads=True)


def evaluate_between(rank: int, world_size: int) -> None:
    """Batches of one pipeline stay in flight while the other one runs over the same model."""
    (model, optimizer), (plain, plain_optimizer) = with_adam(3, dropout=0.5), with_adam(3, dropout=0.5)
    train = TrainPipelineSparseDist(model, optimizer, DEVICE)
    evaluation = EvalPipelineSparseDist(model, optimizer, DEVICE)
    batches, others = make_batches(1, 8), make_batches(2, 5)
    iterator, other_iterator = iter(batches), iter(others)
    torch.manual_seed(9)
    got = []
    for batch in range(8):
        got.append(train.progress(iterator))
        if batch in (2, 5):
            model.eval()
            with torch.no_grad():
                got.append(evaluation.progress(other_iterator))
            model.train()
    torch.manual_seed(9)
    expected = []
    for index, batch in enumerate(batches):
        expected += plain_loop(plain, plain_optimizer, [batch])
        if index in (2, 5):
            plain.eval()
            with torch.no_grad():
                expected.append(plain(on_device(others[index // 3]))[1])
            plain.train()
    assert all(map(torch.equal, got, expected))
    assert_same(model, plain)


def test_train_and_eval_pipelines_share_a_model():
    run_ranks(evaluate_between, 2, "farandole")


def stay_in_window(rank: int, world_size: int) -> None:
    """With the model in eval mode a pipeline runs forward only, and its window goes on after."""
    (model, optimizer), (plain, plain_optimizer) = with_adam(5), with_adam(5)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=2)
    batches = make_batches(1, 6)
    iterator = iter(batches)
    pipeline.progress(iterator)
    before = [parameter.clone() for parameter in model.parameters()]
    model.eval()
    pipeline.progress(iterator)
    assert all(map(torch.equal, model.parameters(), before))
    model.train()
    drain(pipeline, iterator)
    plain_loop(plain, plain_optimizer, [batches[0], *batches[2:]], grad_accum=2)
    assert_same(model, plain)


def test_evaluates_within_a_window():
    run_ranks(stay_in_window, 2, "farandole")


def end_in_evaluation(rank: int, world_size: int) -> None:
    """The end of the data that is evaluated steps nothing: the window goes on with what is trained then."""
    (model, optimizer), (plain, plain_optimizer) = with_adam(5), with_adam(5)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=3)
    batches = make_batches(1, 4)
    iterator = iter(batches[:2])
    outputs = [pipeline.progress(iterator) for _ in range(2)]
    before = [parameter.clone() for parameter in model.parameters()]
    model.eval()
    assert drain(pipeline, iterator) == [] and len(drain(pipeline, iter(make_batches(2, 3)))) == 3
    assert all(map(torch.equal, model.parameters(), before))
    model.train()
    outputs += drain(pipeline, iter(batches[2:]))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches, 3)))
    assert_same(model, plain)


def test_the_end_of_an_evaluation_is_not_that_of_a_window():
    run_ranks(end_in_evaluation, 2, "farandole")


def mix_modes(rank: int, world_size: int, kind: Any) -> None:
    model, optimizer = with_adam(5)
    pipeline = kind(model, optimizer, DEVICE)
    batches = make_batches(1, 6)
    iterator = iter(batches)
    pipeline.progress(iterator)
    ahead = pipeline.in_flight
    model.eval()
    with pytest.warns(
        UserWarning, match=rf"model.eval\(\), while {ahead} batches .* are evaluated, and not trained on"
    ):
        pipeline.progress(other := iter(make_batches(2, 4)))
    ahead = pipeline.in_flight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.progress(other)  # was told
    model.train()
    with pytest.warns(
        UserWarning, match=rf"model.train\(\), while {ahead} .* are trained on, which were to be evaluated"
    ):
        pipeline.progress(iterator)
    drain(pipeline, iterator)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drain(pipeline, iter(make_batches(3, 2)))  # none was in flight


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_batches_in_flight_when_mode_and_data_change_are_told(kind):
    run_ranks(mix_modes, 2, "farandole", kind=kind)


def detach_and_attach(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, plain_optimizer) = with_adam(7), with_adam(7)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 6)
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in range(2)]
    tables = [module for module in model.modules() if isinstance(module, ShardedTables)]
    assert all("forward" in vars(module) for module in tables)
    assert pipeline.detach() is model
    assert not any("forward" in vars(module) for module in tables)
    with torch.no_grad():
        model(on_device(batches[5]))
    outputs += drain(pipeline, iterator)
    expected = plain_loop(plain, plain_optimizer, batches)
    assert all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    # Outside of progress an attached model is what it was, too.
    with torch.no_grad():
        batch = on_device(batches[0])
        assert torch.equal(model(batch)[1], plain(batch)[1])
    other, other_optimizer = with_adam(8)
    pipeline.attach(other, other_optimizer)
    plain, plain_optimizer = with_adam(8)
    outputs = drain(pipeline, iter(batches))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))


def test_detaches_and_attaches():
    run_ranks(detach_and_attach, 2, "farandole")


def attach_another(rank: int, world_size: int) -> None:
    """Batches in flight go through the model that computes them."""
    (model, optimizer), (plain, plain_optimizer) = with_adam(7), with_adam(7)
    (other, other_optimizer), (plain_other, plain_other_optimizer) = with_adam(8, tables=2), with_adam(8, tables=2)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 6)
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in range(2)]
    pipeline.detach()
    pipeline.attach(other, other_optimizer)
    outputs += drain(pipeline, iterator)
    expected = plain_loop(plain, plain_optimizer, batches[:2])
    expected += plain_loop(plain_other, plain_other_optimizer, batches[2:])
    assert all(map(torch.equal, outputs, expected))
    assert_same(other, plain_other)


def test_attaches_another_model_with_batches_in_flight():
    run_ranks(attach_another, 2, "farandole")


def attach_wrong_ones(rank: int, world_size: int) -> None:
    """What attach() refuses leaves the pipeline as it was."""
    (model, optimizer), (plain, plain_optimizer) = with_adam(7), with_adam(7)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_scaler=scaler)
    batches = make_batches(1, 6)
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator)]
    other, other_optimizer = with_adam(8)
    with pytest.raises(ValueError, match=r"optimizer \(Adam\) has no parameter of this DistributedDataParallel"):
        pipeline.attach(other)
    other.fused_optimizer = types.SimpleNamespace(params={"table": None})
    with pytest.raises(ValueError, match="fused into the backward would take scaled gradients"):
        pipeline.attach(other, other_optimizer)
    with pytest.raises(TypeError, match="model is a int"):
        pipeline.attach(3)
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear has no sharded module"):
        pipeline.attach(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    outputs += drain(pipeline, iterator)
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    EvalPipelineSparseDist(model, optimizer, DEVICE).attach(with_adam(8)[0])


def test_attach_refuses_what_a_pipeline_is_not_made_of():
    run_ranks(attach_wrong_ones, 2, "farandole")


def attach_within_a_window(rank: int, world_size: int) -> None:
    (model, optimizer), (other, other_optimizer), (plain, plain_optimizer) = with_adam(7), with_adam(8), with_adam(8)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=2)
    before = [part.clone() for part in model.parameters()]
    batches = make_batches(1, 7)
    iterator = iter(batches)
    pipeline.progress(iterator)
    with pytest.warns(UserWarning, match="within a window of gradient accumulation: it is not stepped"):
        pipeline.attach(other, other_optimizer)
    outputs = drain(pipeline, iterator)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches[1:], 2)))
    assert_same(other, plain)


def test_another_model_begins_a_window():
    run_ranks(attach_within_a_window, 2, "farandole")


def mix_windows(rank: int, world_size: int) -> None:
    model, optimizer = with_adam(7)
    one, other = (TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=2) for _ in range(2))
    iterators = iter(make_batches(1, 8)), iter(make_batches(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pipeline, iterator in 2 * [*zip((one, other), iterators, strict=True)]:  # at the ends of windows
            pipeline.progress(iterator)
            pipeline.progress(iterator)
        one.progress(iterators[0])
    with pytest.warns(UserWarning, match="another pipeline of this model is open, after 1 of 2 batches"):
        other.progress(iterators[1])


def test_windows_of_one_model_do_not_mix_unseen():
    run_ranks(mix_windows, 2, "farandole")


def train_base(rank: int, world_size: int, seed: int) -> None:
    for threads in THREADS.values():
        (model, optimizer), (plain, plain_optimizer) = with_adam(seed), with_adam(seed)
        pipeline = TrainPipelineBase(model, optimizer, DEVICE, grad_accum=3, load_on_thread=threads)
        batches = make_batches(seed, 7)
        outputs = drain(pipeline, iter(batches))
        assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches, 3)))
        assert_same(model, plain)


def test_the_base_pipeline_takes_any_model():
    run_ranks(train_base, 2, "farandole", seed=4)


class Trainer:
    """Its batches come from a method of the object that has the pipeline."""

    def __init__(self, kind: Any) -> None:
        self.seed = 1
        model, optimizer = with_adam(self.seed)
        self.pipeline = kind(model, optimizer, DEVICE, load_on_thread=True)
        self.source = self.batches()

    def batches(self) -> Any:
        yield from make_batches(self.seed, 5)


@pytest.mark.parametrize("steps", [0, 2, 5])
@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_nothing_is_left_of_a_pipeline_that_its_source_alone_has(kind: Any, steps: int) -> None:
    run_ranks(end_with_source, 1, "farandole", kind=kind, steps=steps)


def end_with_source(rank: int, world_size: int, kind: Any, steps: int) -> None:
    trainer = Trainer(kind)
    for _ in range(steps):
        trainer.pipeline.progress(trainer.source)
        gc.collect()
    gone = [weakref.ref(one) for one in (trainer, trainer.pipeline)]
    del trainer
    gc.collect()
    assert [one() for one in gone] == [None] * 2
