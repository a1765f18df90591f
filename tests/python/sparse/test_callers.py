"""What stages on threads of the pipeline's own find as on the caller's: autocast, context variables, modes."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from farandole.sparse import TrainPipelineBase, TrainPipelineSparseDist
from farandole.sparse._caller import Caller
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Mean, drain, made, make_batches

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody's")


def pipeline_of(on_thread: bool | None) -> TrainPipelineBase:
    model = Mean().to(DEVICE)
    return TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE, load_on_thread=on_thread)


def autocast() -> Any:
    kinds = ("cpu", "cuda")
    return torch.is_autocast_cache_enabled(), *(
        (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds
    )


@pytest.mark.parametrize("on_thread", [False, True])
def test_autocast_is_the_callers(on_thread):
    states = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            states.append((autocast(), (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype))
            yield torch.ones(2, device="cpu")

    pipeline, iterator = pipeline_of(on_thread), batches()
    before = autocast()
    for dtype, enabled, cache in [
        (torch.bfloat16, True, True),
        (torch.float16, True, False),
        (torch.bfloat16, False, True),
    ]:
        with torch.autocast("cpu", dtype, enabled, cache):
            pipeline.progress(iterator)
            states.clear()
            pipeline.progress(iterator)
            assert states == [(autocast(), dtype if enabled else torch.float32)]
            assert states[0][0] != before or not enabled
    if torch.accelerator.is_available():
        with torch.autocast(torch.accelerator.current_accelerator().type, torch.bfloat16):
            pipeline.progress(iterator)
            states.clear()
            pipeline.progress(iterator)
            assert states == [(autocast(), torch.float32)]


def elsewhere(call: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_is_as_before_and_leaves_casts_of_others():
    weight = torch.ones(2, 2, device="cpu", requires_grad=True)

    def cast() -> Any:
        return (weight @ weight).grad_fn.next_functions[0][0]  # of the one cast that autocast keeps

    def on_it() -> Any:
        before = autocast()

        def nested() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                pass

        caller.run(nested)
        return before == autocast()

    with torch.autocast("cpu", torch.bfloat16):
        first = cast()
        caller = Caller()
        assert elsewhere(on_it)
        assert cast() is first


@pytest.mark.parametrize("on_thread", [False, True])
def test_context_variables_are_the_callers(on_thread):
    seen = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            seen.append((NAME.get(), np.geterr()["divide"]))
            yield torch.ones(2, device="cpu")

    pipeline, iterator = pipeline_of(on_thread), batches()

    def now() -> tuple[str, str]:
        pipeline.progress(iterator)
        seen.clear()
        pipeline.progress(iterator)
        return seen[0]

    assert now() == ("nobody's", "warn")
    token = NAME.set("mine")
    assert now() == ("mine", "warn")
    with np.errstate(divide="raise"):
        assert now() == ("mine", "raise")
    NAME.set("yours")
    assert now() == ("yours", "warn")
    NAME.reset(token)
    assert now() == ("nobody's", "warn")


@pytest.mark.parametrize("on_thread", [False, True])
def test_an_iterator_keeps_what_it_sets(on_thread):
    """And may reset it as it ends, wherever that is."""
    seen = []

    def batches() -> Iterator[torch.Tensor]:
        with np.errstate(divide="ignore"):
            token = NAME.set("its own")
            for _ in range(5):
                seen.append((NAME.get(), np.geterr()["divide"], threading.get_ident() == here))
                yield torch.ones(2, device="cpu")
            NAME.reset(token)

    here = threading.get_ident()
    assert len(drain(pipeline_of(on_thread), batches())) == 5
    assert [each[:2] for each in seen] == [("its own", "ignore")] * 5
    assert not on_thread or not all(is_here for _, _, is_here in seen)
    assert (NAME.get(), np.geterr()["divide"]) == ("nobody's", "warn")


def test_on_the_callers_thread_an_iterator_has_its_context():
    def batches() -> Iterator[torch.Tensor]:
        NAME.set("the iterator's")
        yield torch.ones(2, device="cpu")

    drain(pipeline_of(None), batches())
    assert NAME.get() == "the iterator's"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = NAME.get()
    yield
    NAME.set(before)


def input_dists(rank: int, world_size: int) -> None:
    seen: list[Any] = []

    def look(*_: int) -> None:
        is_here = threading.get_ident() == here
        state = NAME.get(), autocast(), torch.get_default_device(), torch.is_inference_mode_enabled()
        seen.append((is_here, state))

    here = threading.get_ident()
    model, optimizer = made()
    table = model.module.tables[0]
    table.before_dist = table.before_data = table.before_arrival = look
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, dist_on_thread=True)
    NAME.set("mine")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.device("cpu"):
        expected = NAME.get(), autocast(), torch.get_default_device(), False
        drain(pipeline, iter(make_batches(1, 6)))
    assert {state for _, state in seen} == {expected}
    assert not all(is_here for is_here, _ in seen) or DEVICE != "cpu"


def test_input_dists_run_as_on_the_callers_thread():
    run_ranks(input_dists, 2, "farandole")
