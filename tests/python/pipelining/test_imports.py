"""Programs that import from torch.distributed.pipelining's modules find the same names in ours."""

from __future__ import annotations

import importlib

import pytest

import farandole.pipelining
from farandole.pipelining import schedules
from support.devices import only_on_cpu

pytestmark = only_on_cpu("no tensors")


# What torchtitan and others import, though it is not public.
PRIVATE = ["_PipelineSchedule", "_PipelineScheduleRuntime", "_Action", "FORWARD", "OVERLAP_F_B", "UNSHARD"]


@pytest.mark.parametrize("module", ["", ".schedules", ".stage", ".microbatch"])
def test_torchs_names_are_found_in_our_modules(module: str) -> None:
    theirs = importlib.import_module("torch.distributed.pipelining" + module)
    ours = importlib.import_module("farandole.pipelining" + module)
    names = theirs.__all__ + (PRIVATE if module == ".schedules" else [])
    assert not [name for name in names if not hasattr(ours, name)]
    for name in ours.__all__ if module else []:
        torchs = module == ".microbatch"
        assert getattr(ours, name).__module__.startswith("torch." if torchs else "farandole.") or name == "sum_reducer"
    with pytest.raises((AttributeError, ImportError)):
        exec(f"from farandole.pipelining{module} import ScheduleOfTomorrow")


def test_what_the_modules_hold_is_what_the_package_holds() -> None:
    for name in schedules.__all__:
        assert getattr(farandole.pipelining, name, None) in (None, getattr(schedules, name))
    assert issubclass(schedules.get_schedule_class("ZBVZeroBubble"), schedules._PipelineScheduleRuntime)
    assert not issubclass(schedules.get_schedule_class("1F1B"), schedules._PipelineScheduleRuntime)
