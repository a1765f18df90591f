"""What farandole says of torchrec, in interpreters that find one, none, or one that does not load."""

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import farandole
from farandole.sparse import _requirements
from sparse.asking import asked
from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("asks for packages alone")

ROOT = pathlib.Path(__file__).resolve().parents[3]
FITTING = re.compile(r"torch 2\.11\.\* with torchrec 1\.6\.1 and fbgemm-gpu-cpu 1\.6\.0 would fit")
HAS_TORCHREC = _requirements.torchrec_reason() is None


def python(code: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter, with what this one finds."""
    path = os.pathsep.join([str(pathlib.Path(farandole.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", f"from farandole.sparse._requirements import require_torchrec, torchrec_reason\n{code}"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def ask(folder: pathlib.Path) -> dict[str, Any]:
    [told] = run_ranks(asked, 1, None, folder=folder)
    assert told["before"] == []
    assert told["reasons"][0] == told["reasons"][1]
    return told | {"reason": told["reasons"][0]}


def package(folder: pathlib.Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


def installed(folder: pathlib.Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_torchrec_is_expected_for_the_torch_that_the_extra_names():
    if torch.__version__.startswith(f"{_requirements.TORCH}."):
        assert HAS_TORCHREC, _requirements.torchrec_reason()
    elif not HAS_TORCHREC:
        assert FITTING.search(_requirements.torchrec_reason() or "")


@pytest.mark.skipif(not HAS_TORCHREC, reason="needs a torchrec that loads")
def test_where_torchrec_loads_nothing_is_printed_and_logging_is_left_alone():
    run = python(
        "import logging\n"
        "require_torchrec()\n"
        "import torchrec\n"
        "print(torchrec_reason(), logging.root.handlers, logging.root.filters)"
    )
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "None [] []", "")


@pytest.mark.skipif(HAS_TORCHREC, reason="torchrec is installed")
def test_without_torchrec_the_error_names_what_is_missing_and_what_fits():
    run = python("require_torchrec()")
    assert run.returncode != 0
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: farandole.sparse needs torchrec: "), last
    assert f"torch {torch.__version__}" in last
    assert FITTING.search(last)


def test_an_fbgemm_that_does_not_load_is_told_with_the_reason_of_the_loader(tmp_path):
    loader = "undefined symbol: _ZN3c10"
    package(tmp_path, "fbgemm_gpu", f"raise OSError('Could not load this library: x.so') from OSError('{loader}')")
    package(tmp_path, "torchrec", "")
    installed(tmp_path, "fbgemm-gpu-cpu", "1.9.0")
    installed(tmp_path, "torchrec", "1.7.0")
    told = ask(tmp_path)
    assert f"torch {torch.__version__}, torchrec 1.7.0, fbgemm-gpu-cpu 1.9.0" in told["reason"]
    assert f"OSError: Could not load this library: x.so, from OSError: {loader}" in told["reason"]
    assert FITTING.search(told["reason"])
    assert told["error"] == f"farandole.sparse needs torchrec: {told['reason']}"
    assert told["cause"] == "OSError('Could not load this library: x.so')"


def test_a_torchrec_that_does_not_load_is_told_in_one_line_and_is_not_tried_again(tmp_path):
    package(tmp_path, "fbgemm_gpu", "")
    package(tmp_path, "torchrec", "import sys; print('tried', file=sys.stderr)\nraise RuntimeError('first\\nsecond')")
    told = ask(tmp_path)
    assert told["stderr"] == "tried\n"
    assert "; RuntimeError: first; " in told["reason"]


def test_both_builds_of_fbgemm_are_named_where_one_overwrote_the_other(tmp_path):
    package(tmp_path, "fbgemm_gpu", "raise ImportError('libnvidia-ml.so.1')")
    for name in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        installed(tmp_path, name, "1.6.0")
    assert "fbgemm-gpu-cpu 1.6.0, fbgemm-gpu 1.6.0; " in ask(tmp_path)["reason"]


def test_only_the_table_of_fbgemm_is_kept_from_the_log(tmp_path):
    package(tmp_path, "fbgemm_gpu", "import logging; logging.warning('_fbgemm_torch_compat_table has no entry')")
    package(tmp_path, "torchrec", "import logging; logging.warning('another warning')")
    told = ask(tmp_path)
    assert told["reason"] is None
    assert "error" not in told
    assert told["logging"] == ([], [])
    assert told["stderr"] == "WARNING:root:another warning\n"


def test_extras_and_environment_name_the_versions_of_the_message():
    text = (ROOT / "pyproject.toml").read_text()
    torchrec, fbgemm = f"torchrec=={_requirements.TORCHREC}", _requirements.FBGEMM
    assert f'recsys = ["torch=={_requirements.TORCH}.*", "{torchrec}", "fbgemm-gpu=={fbgemm}"]' in text
    [extra] = re.findall(r"^recsys-cpu = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert f'"torch=={_requirements.TORCH}.*"' in extra
    assert f'"fbgemm-gpu-cpu=={fbgemm}"' in extra
    [group] = re.findall(r"^recsys = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert f'"{torchrec}"' in group
    assert f'"fbgemm-gpu-cpu=={fbgemm}"' in group


@pytest.mark.parametrize(("torch_version", "has"), [("2.11.0", True), ("2.11.1", True), ("2.15.0", False)])
def test_dev_installs_torchrec_where_it_fits(torch_version, has):
    run = subprocess.run(
        ["bash", "-c", "source .ci/lib/setup.sh; if has_torchrec; then echo yes; else echo no; fi"],
        cwd=ROOT,
        env=os.environ | {"ROOT": str(ROOT), "FARANDOLE_TORCH_VERSION": torch_version},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.strip() == ("yes" if has else "no"), run.stderr
