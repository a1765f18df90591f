"""Which torch this farandole was built for."""

from farandole import _build_info


def check(torch_version: str) -> None:
    """Raises ImportError unless ``torch_version`` has the minor version that the extension was built for.

    The C++ half links libtorch, whose interface changes with every minor version.
    """
    built = _build_info.TORCH_VERSION
    if _minor(torch_version) != _minor(built):
        raise ImportError(
            f"farandole was built for torch {_minor(built)}, but torch {torch_version} is installed: "
            "reinstall farandole with this torch present (pip install --no-build-isolation --force-reinstall farandole)"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
