"""Which modules are sharded, and what is inside wrappers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from input_models import Sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel
from farandole.sparse._sharded import is_sharded, sharded_modules, unwrap
from support.devices import only_on_cpu

pytestmark = only_on_cpu("asks modules alone")


def test_sharded_is_what_has_the_methods_of_it() -> None:
    assert is_sharded(Sharded())
    assert not is_sharded(nn.Linear(1, 1))
    almost = Sharded()
    almost.__class__ = type("Almost", (Sharded,), {"input_dist": None})
    assert not is_sharded(almost)


def test_sharded_modules_are_named_once_and_not_looked_into() -> None:
    outer = Sharded()
    outer.inner = Sharded()
    model = nn.ModuleDict({"x": nn.Sequential(nn.Linear(1, 1), outer), "y": outer, "z": Sharded()})
    assert list(sharded_modules(model, is_sharded)) == ["x.1", "z"]
    assert list(sharded_modules(outer, is_sharded)) == [""]


def test_wrappers_are_taken_off_and_their_names_kept() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))

    class Dmp(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._dmp_wrapped_module = module

    class Own(nn.Module):
        """Has a child of that name, and is no wrapper."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert unwrap(inner) == (inner, "")
    assert unwrap(Own(inner))[1] == ""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrap in (TorchDdp, DistributedDataParallel):
            for model in (Dmp(wrap(inner)), wrap(Dmp(inner)), torch.compile(wrap(inner), backend="eager")):
                found, prefix = unwrap(model)
                assert found is inner
                assert dict(model.named_modules())[prefix + "0"] is inner[0]
    finally:
        dist.destroy_process_group()


def test_torchrec_is_not_imported_to_find_out() -> None:
    code = """
import sys
from input_models import Sharded
from farandole.sparse._sharded import is_sharded
assert is_sharded(Sharded())
assert not [name for name in sys.modules if name.startswith(("torchrec", "torch.distributed.fsdp"))]
"""
    folder = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {code}"], check=True, timeout=120
    )
