"""Makes the kit of a GPU machine that reaches no package registry, and lays its packages out there.

usage: gpu_kit.py make FOLDER --python 3.12 --ucx libucx-cu13==VERSION
       gpu_kit.py unpack FOLDER SITE

"make" runs in the environment of ./dev: what pyproject.toml pins has the version that is named there, what that needs
in turn the version that the environment has. The same inputs give the same bytes; a kit that is made from them already
is left as it is. "unpack" needs nothing but Python: it fills SITE, which PYTHONPATH will name.

FOLDER/wheels      Python packages; UCX without its tools, static libraries and copies
FOLDER/include     the Boost headers that farandole's sources include, directly or not
FOLDER/googletest  its sources
FOLDER/cuda        headers that torch's wheels lack
FOLDER/cmake       how find_package finds the above
FOLDER/MANIFEST    a hash of every file, and of what they were made from
"""

import argparse
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = ROOT / ".ci" / "lib" / "gpu_kit"
LAYERS = ("backend", "pipeline", "ddp", "bindings", "tests")
BOOST = re.compile(r"^\s*#\s*include\s+<(boost/[^>]+)>", re.MULTILINE)
# The machine's compiler may be newer than this Boost, and the headers of newer ones include fewer of each other: what
# Boost uses and got by the way.
OLD_BOOST_NEEDS = ("cstdint", "cstdlib", "cstring", "functional", "memory", "stdexcept", "string", "utility")
LIMIT = 60_000_000  # bytes in all
# Of the pinned packages: what the build, the tests and the benchmarks on a GPU import.
WANTED = ("numpy", "rich", "pytest", "pytest-timeout", "scikit-build-core")
CUDA_HEADERS = {"nvidia-cuda-cccl": "nv", "nvidia-cuda-crt": "crt"}  # the folder that is wanted of each
MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
# UCX's libraries come three times each, as lib.so, lib.so.0 and lib.so.0.0.0: the loader takes the second.
NOT_OF_UCX = re.compile(
    r"libucx/(bin/|share/|lib/pkgconfig/|lib/cmake/|.*perftest|.*\.a$|.*\.la$|.*\.so(\.\d+\.\d+\.\d+)?$)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=pathlib.Path)
    making.add_argument("--python", required=True, metavar="3.N", help="of the machine with the GPU")
    making.add_argument("--ucx", required=True, help="the requirement of UCX's wheel")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=pathlib.Path)
    unpacking.add_argument("site", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "unpack":
        unpack(options.folder, options.site)
    elif not re.fullmatch(r"3\.1[0-3]", options.python):
        sys.exit(f"gpu-kit: --python is {options.python}; expected 3.10 to 3.13")
    else:
        make(options.folder, options.python, options.ucx)


def make(folder: pathlib.Path, python: str, ucx: str) -> None:
    inputs = hash_of_inputs(python, ucx)
    if is_whole(folder, inputs):
        print(f"{folder} is up to date")
        show_sizes(folder)
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "MANIFEST").is_file():
        sys.exit(f"gpu-kit: {folder} holds something else than a kit; expected a new or an empty folder, or a kit")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gpu-kit-") as temporary:
        kit = pathlib.Path(temporary) / "kit"
        (kit / "wheels").mkdir(parents=True)
        download(versions(python, ucx), python, kit / "wheels")
        trim_ucx(kit / "wheels")
        move_cuda_headers(kit)
        copy_boost(kit / "include")
        copy_googletest(kit / "googletest")
        shutil.copytree(CONFIGS, kit / "cmake")
        total = sum(file.stat().st_size for file in files_of(kit))
        if total > LIMIT:
            show_sizes(kit)
            sys.exit(f"gpu-kit: {total / 1e6:.1f} MB in all; expected at most {LIMIT / 1e6:.0f}")
        lines = [f"{digest(file.read_bytes())}  {file.relative_to(kit).as_posix()}" for file in files_of(kit)]
        header = [f"farandole GPU kit for Python {python}, {platform.machine()}", f"inputs {inputs}"]
        (kit / "MANIFEST").write_text("\n".join([*header, *lines]) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        kit.rename(folder)
    print(f"made {folder}")
    show_sizes(folder)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def sources_with_boost() -> list[pathlib.Path]:
    sources = [file for layer in LAYERS for end in ("*.h", "*.cc") for file in (ROOT / layer).rglob(end)]
    return sorted(file for file in sources if BOOST.search(file.read_text()))


def hash_of_inputs(python: str, ucx: str) -> str:
    """Changes with all that decides what is in the kit."""
    files = [ROOT / "pyproject.toml", pathlib.Path(__file__), *files_of(CONFIGS), *sources_with_boost()]
    files += [
        file
        for name in ("boost/version.hpp", "gtest/gtest.h")
        if (file := pathlib.Path("/usr/include", name)).is_file()
    ]
    parts = [f"{python} {ucx} {platform.machine()}".encode(), *(file.read_bytes() for file in files)]
    return digest(b"\0".join(digest(part).encode() for part in parts))


def is_whole(folder: pathlib.Path, inputs: str | None = None) -> bool:
    """Is it a kit with every file as it was made, and made from these inputs?"""
    manifest = folder / "MANIFEST"
    if not manifest.is_file():
        return False
    _, made_from, *lines = manifest.read_text().splitlines()
    if inputs is not None and made_from != f"inputs {inputs}":
        return False
    entries = [line.split("  ", 1) for line in lines]
    return all((folder / name).is_file() and digest((folder / name).read_bytes()) == sha for sha, name in entries)


def versions(python: str, ucx: str) -> dict[str, str]:
    """name -> version of every package of the kit."""
    import importlib.metadata

    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    machine = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pins: dict[str, str] = {}
    for text in [ucx, *(entry for group in groups.values() for entry in group if isinstance(entry, str))]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            pins[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    chosen: dict[str, str] = {}
    waiting = [canonicalize_name(Requirement(ucx).name), *CUDA_HEADERS, *WANTED]
    while waiting:
        name = waiting.pop()
        if name in chosen:
            continue
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(
                f"gpu-kit: Python {python} needs {name}, which this environment lacks: FARANDOLE_PYTHON=python{python}"
            )
        chosen[name] = pins.get(name, installed.version)
        for text in installed.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(machine):
                waiting.append(canonicalize_name(requirement.name))
    return chosen


def download(chosen: dict[str, str], python: str, target: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(target)]  # fmt: skip
    command += [part for tag in MANYLINUX for part in ("--platform", f"{tag}_{platform.machine()}")]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in sorted(chosen.items()))], check=True)


def trim_ucx(wheels: pathlib.Path) -> None:
    (whole,) = wheels.glob("libucx_*.whl")
    trimmed = whole.with_suffix(".new")
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(trimmed, "w") as result:
        for entry in source.infolist():
            if not NOT_OF_UCX.match(entry.filename):
                result.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED, 9)
    trimmed.replace(whole)


def move_cuda_headers(kit: pathlib.Path) -> None:
    """No package of the kit may be called nvidia: torch looks for its libraries in those."""
    for package, folder in CUDA_HEADERS.items():
        (wheel,) = (kit / "wheels").glob(f"{package.replace('-', '_')}-*.whl")
        wanted = re.compile(rf"nvidia/cu\d+/include/({folder}/.*[^/])")
        with zipfile.ZipFile(wheel) as archive:
            for found in filter(None, map(wanted.fullmatch, archive.namelist())):
                target = kit / "cuda" / found[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(found[0]))
        wheel.unlink()


def boost_headers() -> dict[str, pathlib.Path]:
    """What the compiler reads of Boost, by its name in an #include, with assertions and without."""
    names = sorted({name for source in sources_with_boost() for name in BOOST.findall(source.read_text())})
    text = "".join(f"#include <{name}>\n" for name in names)
    found: dict[str, pathlib.Path] = {}
    for flags in (["-DNDEBUG"], []):
        command = ["g++", "-std=c++20", "-M", *flags, "-x", "c++", "-"]
        rule = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, text=True).stdout
        for word in rule.replace("\\\n", " ").split():
            path = pathlib.Path(os.path.normpath(word))
            _, is_boost, name = path.as_posix().rpartition("/include/boost/")
            if is_boost:
                found[f"boost/{name}"] = path
    if not found:
        sys.exit("gpu-kit: no source includes Boost; expected some in backend/net")
    folder = pathlib.Path(os.path.commonpath(found.values()))
    return found | {"boost/version.hpp": folder / "version.hpp"}


def copy_boost(target: pathlib.Path) -> None:
    for name, header in boost_headers().items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header, target / name)
    # Asio's headers include this one first of all.
    config = target / "boost" / "asio" / "detail" / "config.hpp"
    config.write_text("".join(f"#include <{name}>\n" for name in OLD_BOOST_NEEDS) + config.read_text())


def copy_googletest(target: pathlib.Path) -> None:
    source = pathlib.Path("/usr/src/googletest/googletest")
    if not (source / "src" / "gtest-all.cc").is_file():
        sys.exit(f"gpu-kit: {source} has no sources of GoogleTest; expected those of Debian's package googletest")
    shutil.copytree(source / "src", target / "src")
    shutil.copytree(source / "include", target / "include")


def show_sizes(folder: pathlib.Path) -> None:
    def line(name: str, files: list[pathlib.Path]) -> None:
        print(f"  {sum(file.stat().st_size for file in files) / 1e6:6.2f} MB  {len(files):4} files  {name}")

    for part in sorted(folder.iterdir()):
        if part.name == "wheels":
            for wheel in files_of(part):
                line(f"wheels/{wheel.name}", [wheel])
        elif part.is_dir():
            line(part.name, files_of(part))
    line(f"in all (at most {LIMIT / 1e6:.0f} MB)", files_of(folder))


def unpack(folder: pathlib.Path, site: pathlib.Path) -> None:
    if not is_whole(folder):
        sys.exit(f"test-gpu: {folder} is no whole kit; expected a folder that ./dev gpu-kit made")
    made_for = (folder / "MANIFEST").read_text().splitlines()[0].rsplit("for ", 1)[1]
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]}, {platform.machine()}"
    if made_for != here:
        sys.exit(
            f"test-gpu: the kit {folder} is for {made_for}; this is {here}. ./dev gpu-kit --python makes another one"
        )
    stamp, mark = site / ".farandole-kit", digest((folder / "MANIFEST").read_bytes())
    if stamp.is_file() and stamp.read_text() == mark:
        return
    shutil.rmtree(site, ignore_errors=True)
    for wheel in files_of(folder / "wheels"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    stamp.write_text(mark)


if __name__ == "__main__":
    main()
