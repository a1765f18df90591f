"""The NCCL half: its table of functions is taken from the copy that torch has loaded."""

import pytest
import torch

from farandole import _C


def test_the_table_is_filled_from_torchs_own_nccl():
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        pytest.skip("torch was built without CUDA or NCCL")
    assert _C.nccl_status() == ".".join(map(str, torch.cuda.nccl.version()))
