"""The rules of docs/design.md, section 1, read from the sources themselves."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
LAYERS = ("backend", "pipeline", "ddp", "bindings", "examples", "tests")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
SYSTEM_INCLUDE = re.compile(r"^\s*#\s*include\s+<([^>]+)>", re.MULTILINE)
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|pybind11)/|^Python\.h$")

# What the headers and sources of a folder may include, beside their own folder.
# The longest prefix that matches a path is the one that counts.
COMMON = ("backend/common", "backend/observe")
PLANNING = ("backend/common",)
MOVING = ("backend/p2p", "backend/net", "backend/transport", "backend/collective")
ALLOWED = {
    "backend/common": (),
    "backend/observe": ("backend/common",),
    "backend/extension": (),
    "backend/p2p": ("backend/common",),
    "backend/net": ("backend/common",),
    "backend/transport": (*COMMON, "backend/p2p", "backend/net"),
    "backend/collective": (*COMMON, "backend/p2p", "backend/transport"),
    "backend/c10d": (*COMMON, *MOVING, "backend/extension"),
    "pipeline/ir": PLANNING,
    "pipeline/passes": (*PLANNING, "pipeline/ir"),
    "pipeline/schedules": (*PLANNING, "pipeline/ir", "pipeline/passes"),
    "pipeline/runtime": (*COMMON, "pipeline"),
    "pipeline/train": (*COMMON, "pipeline"),
    "pipeline/sparse": (),
    "ddp": (*COMMON, "backend/extension"),
    "bindings": ("backend", "pipeline", "ddp"),
    "examples": ("backend", "pipeline", "ddp"),
    "tests": ("backend", "pipeline", "ddp"),
}
# Free of torch, so that they build once for all its versions and are tested under sanitizers.
TORCH_FREE = (
    "backend/common", "backend/observe", "backend/p2p", "backend/net", "backend/transport", "backend/collective",
    "pipeline/ir", "pipeline/passes", "pipeline/schedules", "pipeline/sparse",
    "ddp/bucket_groups", "ddp/bucket_layout", "ddp/bucket_tuning", "ddp/issue_queue", "ddp/reduction_cost",
)  # fmt: skip


def sources() -> list[pathlib.Path]:
    return sorted(file for layer in LAYERS for end in ("*.h", "*.cc") for file in (ROOT / layer).rglob(end))


def inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def rule_of(path: str) -> str | None:
    matching = [folder for folder in ALLOWED if inside(path, folder)]
    return max(matching, key=len, default=None)


def violations(path: str, text: str) -> list[str]:
    """What is wrong with the includes of the file `path` whose content is `text`."""
    rule = rule_of(path)
    if rule is None:
        return [f"{path}: in no layer of {sorted(ALLOWED)}"]
    found = []
    for name in INCLUDE.findall(text):
        if not any(inside(name, folder) for folder in (rule, *ALLOWED[rule])):
            found.append(f'{path}: includes "{name}", but {rule} may include only {ALLOWED[rule]}')
    torch_free = any(path.startswith(prefix) for prefix in TORCH_FREE)
    for name in SYSTEM_INCLUDE.findall(text):
        if torch_free and TORCH_HEADER.match(name):
            found.append(f"{path}: includes <{name}>, but this folder is free of torch")
    return found


def test_includes_point_down_only():
    files = sources()
    assert len(files) > 10
    found = []
    for file in files:
        found += violations(file.relative_to(ROOT).as_posix(), file.read_text())
    assert not found, "\n".join(found)


def test_every_quoted_include_names_a_file_from_the_top_of_the_tree():
    missing = [
        f'{file.relative_to(ROOT)}: "{name}"'
        for file in sources()
        for name in INCLUDE.findall(file.read_text())
        if not (ROOT / name).is_file()
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("pipeline/runtime/stage.cc", '#include "backend/c10d/work.h"'),
        ("pipeline/runtime/stage.cc", '#include "ddp/bucket.h"'),
        ("pipeline/train/schedule.cc", '#include "backend/c10d/process_group.h"'),
        ("ddp/bucket.cc", '#include "pipeline/ir/plan.h"'),
        ("backend/common/log.cc", '#include "backend/observe/metrics.h"'),
        ("backend/transport/ucx/worker.h", '#include "backend/c10d/work.h"'),
        ("backend/p2p/batch.h", "#include <torch/csrc/distributed/c10d/Work.hpp>"),
        ("pipeline/ir/plan.h", "#include <c10/util/Exception.h>"),
        ("backend/c10d/work.h", '#include "bindings/csrc/layers.h"'),
        ("elsewhere/file.h", "#include <vector>"),
    ],
)
def test_a_forbidden_include_is_found(path, line):
    assert violations(path, f"#pragma once\n{line}\n")


@pytest.mark.parametrize("layer", ["backend", "pipeline", "ddp", "bindings", "examples", "tests"])
def test_each_layer_is_built_by_cmake(layer):
    assert (ROOT / layer / "CMakeLists.txt").is_file()
    assert f"add_subdirectory({layer})" in (ROOT / "CMakeLists.txt").read_text()


def cmake_sources(folder: pathlib.Path) -> set[pathlib.Path]:
    """The .cc files that the CMakeLists.txt of a folder names."""
    text = re.sub(r"#.*", "", (folder / "CMakeLists.txt").read_text())
    return {folder / name for name in re.findall(r"[\w./-]+\.cc\b", text)}


def test_files_that_cmake_names_exist_and_sources_are_named_by_cmake():
    named = set()
    for lists in (file for layer in LAYERS for file in (ROOT / layer).rglob("CMakeLists.txt")):
        named |= cmake_sources(lists.parent)
    present = {file for file in sources() if file.suffix == ".cc"}
    assert sorted(named - present) == [], "named by a CMakeLists.txt, but not there"
    assert sorted(present - named) == [], "a source that no CMakeLists.txt builds"


def test_headers_are_guarded_by_pragma_once():
    bare = [str(file) for file in sources() if file.suffix == ".h" and "#pragma once" not in file.read_text()]
    assert bare == []


def test_files_stay_small():
    limits = {".h": 400, ".cc": 400, ".py": 400}
    files = [*sources(), *(ROOT / "bindings").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    long = [
        f"{file.relative_to(ROOT)}: {lines} lines"
        for file in files
        if not inside(file.relative_to(ROOT).as_posix(), "tests")
        if (lines := len(file.read_text().splitlines())) > limits[file.suffix]
    ]
    assert long == [], "one concept for each file (docs/design.md, section 7)"
