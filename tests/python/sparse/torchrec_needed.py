"""For tests of torchrec's modules."""

import pytest

from farandole.sparse._requirements import torchrec_reason
from support.devices import only_on_cpu

needs_torchrec = [
    pytest.mark.skipif(torchrec_reason() is not None, reason=torchrec_reason() or ""),
    only_on_cpu("fbgemm's kernels for CUDA are a package of their own"),
]
