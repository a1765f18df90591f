"""Says whether tests can run on a GPU here: prints what there is as JSON, or why not in one line, with status 3.

usage: gpu_probe.py driver     is there a driver, and a device? Needs nothing but Python.
       gpu_probe.py torch      and does this interpreter's torch use it?
"""

import ctypes
import json
import platform
import sys
from typing import Any

NOTHING = 3  # exit status


class NoGpuError(Exception):
    """Why no GPU can be used."""


def driver() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NoGpuError("no NVIDIA driver: there is no libcuda.so.1") from None
    version, devices = ctypes.c_int(), ctypes.c_int()
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(devices))
    if status != 0:
        raise NoGpuError(f"no device: the NVIDIA driver answers with CUDA error {status}")
    if devices.value == 0:
        raise NoGpuError("no device: the NVIDIA driver sees none")
    library.cuDriverGetVersion(ctypes.byref(version))
    return {"driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "devices": devices.value}


def torch_on_gpu() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise NoGpuError(f"no torch in {sys.executable} ({error})") from None
    if torch.version.cuda is None:
        raise NoGpuError(f"torch {torch.__version__} in {sys.executable} is without CUDA")
    found = driver()
    if not torch.cuda.is_available():
        raise NoGpuError(
            f"torch {torch.__version__}, for CUDA {torch.version.cuda}, cannot use the driver (CUDA {found['driver_cuda']})"
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return found | {
        "devices": names, "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl,
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> int:
    try:
        print(json.dumps({"driver": driver, "torch": torch_on_gpu}[sys.argv[1]]()))
    except NoGpuError as reason:
        print(reason)
        return NOTHING
    return 0


if __name__ == "__main__":
    sys.exit(main())
