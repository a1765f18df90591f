"""Makes ``init_process_group("farandole")`` work with no import of farandole.

The entry points ``torch.backends`` (every torch) and ``torch.distributed.backends``
(torch that looks a backend up by name) name this module. torch runs the first
while it is being imported, and a plugin that raises there breaks ``import
torch``: so this module imports the standard library only, and what is called at
import registers a function and no more. A broken installation shows when a
group is made.
"""

import sys
import threading

_NAME = "farandole"
_DEVICES = ["cpu", "cuda"]
_lock = threading.Lock()


def autoload() -> None:
    """Entry point of ``torch.backends``, which runs inside ``import torch``: never raises."""
    try:
        register()
    except Exception as error:
        sys.stderr.write(f"farandole: not registered with torch.distributed: {error!r}\n")


def register() -> None:
    """Entry point of ``torch.distributed.backends``: registers the backend, once."""
    import torch.distributed as dist

    with _lock:
        if not dist.is_available() or _NAME.upper() in dist.Backend._plugins:
            return
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=_DEVICES)


def _create(options, backend_options=None):
    import farandole

    return farandole.create_backend(options, backend_options)
