"""The build refuses a compiler whose modules would crash beside torch."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("g++")), reason="needs cmake and g++ on PATH")
def test_a_compiler_that_links_libstdcxx_statically_is_refused(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    shown = subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DCMAKE_CXX_COMPILER={compiler}"],
        env={name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "LDFLAGS")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode != 0
    said = " ".join(shown.stderr.split())
    assert f"{compiler} links libstdc++ statically: expected a compiler that links libstdc++.so.6" in said
