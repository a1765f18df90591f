"""./dev gpu-kit and ./dev test-gpu, as far as they can be seen without a GPU: what is said where there is none, what a
kit holds and how it is laid out, and the report."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_kit, gpu_report = load("gpu_kit"), load("gpu_report")


def run(*command, **environment):
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    """A folder with a libcuda.so.1 that answers as FAKE_STATUS and FAKE_DEVICES say."""
    folder = tmp_path_factory.mktemp("driver")
    source = """
#include <stdlib.h>
static int said(const char* name) { return atoi(getenv(name)); }
int cuInit(unsigned flags) { return said("FAKE_STATUS"); }
int cuDeviceGetCount(int* count) { *count = said("FAKE_DEVICES"); return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
"""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return folder


def probe(what, driver, tmp_path, torch=None, status=0, devices=1):
    if torch is not None:
        (tmp_path / "torch.py").write_text(torch)
    environment = {"LD_LIBRARY_PATH": str(driver), "FAKE_STATUS": str(status), "FAKE_DEVICES": str(devices)}
    # -I -S: no torch but the one that is put there.
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['', {what!r}]; import runpy; "
    script += f"runpy.run_path({str(ROOT / '.ci' / 'gpu_probe.py')!r}, run_name='__main__')"
    shown = run(sys.executable, "-I", "-S", "-c", script, **environment)
    return shown.returncode, shown.stdout.strip()


TORCH = """
__version__ = "2.11.0"
class version: cuda = {cuda!r}
class cuda:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda index: "a GPU")
    class nccl: version = staticmethod(lambda: (2, 28, 9))
class distributed: is_nccl_available = staticmethod(lambda: True)
"""


@pytest.mark.parametrize(
    ("what", "torch", "answers", "reason"),
    [
        ("driver", None, {"status": 100}, "no device: the NVIDIA driver answers with CUDA error 100"),
        ("driver", None, {"devices": 0}, "no device: the NVIDIA driver sees none"),
        ("torch", None, {}, "no torch in "),
        ("torch", TORCH.format(cuda=None, available=False), {}, "torch 2.11.0 in "),
        ("torch", TORCH.format(cuda="13.0", available=False), {}, "torch 2.11.0, for CUDA 13.0, cannot use the driver"),
    ],
)
def test_where_no_gpu_can_be_used_the_reason_is_one_line(what, torch, answers, reason, fake_driver, tmp_path):
    status, said = probe(what, fake_driver, tmp_path, torch, **answers)
    assert status == 3
    assert said.startswith(reason)
    assert "\n" not in said


def test_without_a_driver_that_is_said(tmp_path):
    script = "import ctypes, runpy, sys; ctypes.CDLL = lambda name: (_ for _ in ()).throw(OSError()); "
    script += "sys.argv = ['', 'driver']; runpy.run_path('.ci/gpu_probe.py', run_name='__main__')"
    shown = run(sys.executable, "-c", script)
    assert shown.returncode == 3
    assert shown.stdout == "no NVIDIA driver: there is no libcuda.so.1\n"


def test_where_there_is_a_gpu_the_machine_is_described(fake_driver, tmp_path):
    status, said = probe("torch", fake_driver, tmp_path, TORCH.format(cuda="13.0", available=True))
    assert status == 0
    facts = json.loads(said)
    assert (facts["devices"], facts["nccl"], facts["driver_cuda"]) == (["a GPU"], "2.28.9", "13.0")


def test_without_a_gpu_test_gpu_says_why_and_succeeds(fake_driver):
    environment = {"LD_LIBRARY_PATH": str(fake_driver), "FAKE_STATUS": "100", "FAKE_DEVICES": "0"}
    shown = run("./dev", "test-gpu", "--no-kit", **environment)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "test-gpu: skipped: no device: the NVIDIA driver answers with CUDA error 100\n"


def test_a_folder_that_is_no_kit_is_refused(tmp_path):
    shown = run("./dev", "test-gpu", "--kit", str(tmp_path))
    assert shown.returncode != 0
    assert f"--kit {tmp_path}: expected a folder that ./dev gpu-kit made" in shown.stderr


def test_a_kit_for_an_unknown_python_is_refused_before_any_set_up():
    shown = run("./dev", "gpu-kit", "--python", "2.7")
    assert shown.returncode != 0
    assert "--python is '2.7'; expected 3.10 to 3.13" in shown.stderr
    assert shown.stdout == ""


def test_the_kit_has_all_of_boost_that_the_sources_include_and_little_else(tmp_path):
    gpu_kit.copy_boost(tmp_path)
    headers = gpu_kit.files_of(tmp_path)
    assert 100 < len(headers) < 2000
    # -MG: headers of UCX or torch, which Boost does not need, may be missing.
    sources = [str(source) for source in gpu_kit.sources_with_boost() if source.suffix == ".cc"]
    command = ["g++", "-std=c++20", "-M", "-MG", "-I", str(tmp_path), "-I", str(ROOT), *sources]
    words = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    read = {word for word in words if "boost/" in word}
    assert len(read) > 100
    assert {word for word in read if not word.startswith(f"{tmp_path}/boost/")} == set()


def test_every_package_of_the_kit_has_one_version_and_pins_are_kept():
    chosen = gpu_kit.versions("3.12", "libucx-cu13==1.22.0")
    pinned = (ROOT / "pyproject.toml").read_text()
    assert chosen["libucx-cu13"] == "1.22.0"
    for name in ("rich", "pytest", "pytest-timeout", "scikit-build-core", *gpu_kit.CUDA_HEADERS):
        assert f'"{name}=={chosen[name]}"' in pinned
    assert f"numpy=={chosen['numpy']}; python_version >= '3.11'" in pinned
    assert {"pluggy", "iniconfig", "pygments", "packaging"} <= chosen.keys()  # what those need
    assert not any(name.startswith(("torch", "cmake", "ninja", "uv")) for name in chosen)  # the machine has it


def test_of_ucx_the_libraries_and_headers_stay(tmp_path):
    wheel = tmp_path / "libucx_cu13-1-py3-none-any.whl"
    stay = ["libucx/__init__.py", "libucx/lib/libucp.so.0", "libucx/lib/ucx/libuct_cma.so.0", "libucx/include/ucp/api/ucp.h",
            "libucx_cu13.libs/libgomp-1.so.1.0.0", "libucx_cu13-1.dist-info/METADATA"]  # fmt: skip
    go = ["libucx/bin/ucx_info", "libucx/lib/libucp.so", "libucx/lib/libucp.so.0.0.0", "libucx/lib/libucp.a",
          "libucx/lib/ucx/libucx_perftest_cuda.so.0"]  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*stay, *go]:
            archive.writestr(name, name)
    gpu_kit.trim_ucx(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == stay
        assert archive.read(stay[1]).decode() == stay[1]


def test_the_headers_of_cuda_and_nccl_are_whole_in_the_wheels():
    """A machine without a toolkit has no others: what a compiler finds elsewhere is missing there."""
    nvidia = pathlib.Path(sysconfig.get_paths()["platlib"], "nvidia")
    ours = [nvidia / "nccl" / "include", *nvidia.glob("cu*/include")]
    includes = [option for folder in ours for option in ("-isystem", str(folder))]
    command = ["g++", "-x", "c++", "-M", *includes, "-"]
    shown = subprocess.run(command, input="#include <nccl.h>\n", check=True, capture_output=True, text=True, timeout=60)
    read = [pathlib.Path(word) for word in shown.stdout.split() if word.startswith("/")]
    of_nvidia = [file for file in read if file.name.startswith(("cuda", "nccl")) or file.parent.name in ("crt", "nv")]
    assert len(of_nvidia) > 10
    assert [file for file in of_nvidia if nvidia not in file.parents] == []


def test_of_cudas_headers_the_kit_has_those_that_torchs_wheels_lack(tmp_path):
    (tmp_path / "wheels").mkdir()
    for package, folder in gpu_kit.CUDA_HEADERS.items():
        with zipfile.ZipFile(tmp_path / "wheels" / f"{package.replace('-', '_')}-1-py3-none-any.whl", "w") as archive:
            for name in (f"{folder}/wanted.h", f"{folder}/detail/too", f"cccl/{folder}/not.h", "other/not.h"):
                archive.writestr(f"nvidia/cu13/include/{name}", name)
            archive.writestr(f"{package}-1.dist-info/METADATA", "")
    gpu_kit.move_cuda_headers(tmp_path)
    left = {file.relative_to(tmp_path).as_posix() for file in gpu_kit.files_of(tmp_path)}
    assert left == {f"cuda/{folder}/{name}" for folder in ("crt", "nv") for name in ("wanted.h", "detail/too")}


@pytest.fixture
def small_kit(tmp_path):
    """As "make" leaves one, for this Python."""
    kit = tmp_path / "kit"
    (kit / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(kit / "wheels" / "one-1-py3-none-any.whl", "w") as archive:
        archive.writestr("one/__init__.py", "NUMBER = 1\n")
    (kit / "include").mkdir()
    (kit / "include" / "header.hpp").write_text("#pragma once\n")
    lines = [
        f"{gpu_kit.digest(file.read_bytes())}  {file.relative_to(kit).as_posix()}" for file in gpu_kit.files_of(kit)
    ]
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]}, {gpu_kit.platform.machine()}"
    (kit / "MANIFEST").write_text("\n".join([f"farandole GPU kit for {here}", "inputs 1234", *lines]) + "\n")
    return kit


def test_a_kit_is_unpacked_once_and_again_after_it_has_changed(small_kit, tmp_path):
    site = tmp_path / "site"
    gpu_kit.unpack(small_kit, site)
    assert (site / "one" / "__init__.py").read_text() == "NUMBER = 1\n"
    (site / "one" / "mark").touch()
    gpu_kit.unpack(small_kit, site)
    assert (site / "one" / "mark").exists()
    (small_kit / "MANIFEST").write_text((small_kit / "MANIFEST").read_text().replace("inputs 1234", "inputs 5678"))
    gpu_kit.unpack(small_kit, site)
    assert not (site / "one" / "mark").exists()


def test_a_damaged_kit_is_no_kit(small_kit, tmp_path):
    assert gpu_kit.is_whole(small_kit)
    assert gpu_kit.is_whole(small_kit, "1234")
    assert not gpu_kit.is_whole(small_kit, "5678")
    (small_kit / "include" / "header.hpp").write_text("#pragma twice\n")
    with pytest.raises(SystemExit, match="is no whole kit"):
        gpu_kit.unpack(small_kit, tmp_path / "site")


def test_a_kit_for_another_python_is_refused(small_kit, tmp_path):
    manifest = small_kit / "MANIFEST"
    manifest.write_text(manifest.read_text().replace("for Python 3.", "for Python 4."))
    with pytest.raises(SystemExit, match=r"is for Python 4\.\d+.*; this is Python 3\."):
        gpu_kit.unpack(small_kit, tmp_path / "site")


def test_a_folder_with_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit, match="holds something else than a kit"):
        gpu_kit.make(tmp_path, "3.12", "libucx-cu13==1.22.0")
    assert (tmp_path / "precious").exists()


PYTEST = """<testsuites><testsuite>
<testcase classname="tests.python.gpu.test_streams" name="test_a[one]" time="1.5"><properties><property name="placement" value="2 ranks"/><property name="seconds" value="0.5"/></properties></testcase>
<testcase classname="tests.python.gpu.test_streams" name="test_a[several]" time="0.1"><skipped message="one GPU"/></testcase>
{more}</testsuite></testsuites>"""
CTEST = """<testsuite>
<testcase name="NcclApi.A" time="0.1" status="run"/>
<testcase name="NcclApi.B" time="0.2" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>file.cc:7: Skipped
no GPU here

[  SKIPPED ]</system-out></testcase></testsuite>"""
FAILED = (
    '<testcase classname="x.test_errors" name="test_b" time="1"><failure message="assert 1 == 2&#10;more"/></testcase>'
)


BENCH = {
    "skipped": {},
    "subjects": [
        {
            "series": [{"case": "8 B", "peer": "nccl", "quantity": "host", "median": 1e-5}],
            "ratios": [{"case": "8 B", "name": "host / NCCL's", "median": 0.5}],
            "notes": [],
        }
    ],
}


@pytest.mark.parametrize(("more", "status"), [("", 0), (FAILED, 1)])
def test_the_report_says_what_ran_what_was_skipped_and_why(tmp_path, more, status):
    for report, text in (("pytest", more), ("pytest-on-gpus", "")):
        (tmp_path / report).mkdir()
        (tmp_path / report / "gpu-test_streams.py.xml").write_text(PYTEST.format(more=text))
    (tmp_path / "ctest.xml").write_text(CTEST)
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    shown = run(sys.executable, ".ci/gpu_report.py", str(tmp_path), "--probe", '{"devices": ["a GPU"]}')
    assert shown.returncode == status
    document = json.loads((tmp_path / "figures.json").read_text())
    assert json.loads(shown.stdout[shown.stdout.index("\n{") :]) == document
    assert document["machine"] == {"devices": ["a GPU"]}
    for report in ("pytest", "pytest-on-gpus"):
        parts = document["parts"][f"{report}: gpu.test_streams"]
        assert parts == {"passed": 1, "failed": 0, "skipped": 1, "seconds": 1.6}
    assert document["parts"]["ctest: NcclApi"] == {"passed": 1, "failed": 0, "skipped": 1, "seconds": 0.3}
    assert document["skipped"] == {"no GPU here": 1, "one GPU": 2}
    assert document["figures"] == {"test_a[one]": {"seconds": "0.5"}}
    assert document["several ranks"] == ["2 ranks"]
    assert document["bench"] == {"8 B": {"nccl host": 1e-5, "host / NCCL's": 0.5}}
    assert list(document["failures"].values()) == (["assert 1 == 2"] if more else [])
    for text in ("test_streams", "no GPU here", "one GPU"):
        assert text in shown.stdout


def test_where_all_is_skipped_the_report_fails(tmp_path):
    skipped = PYTEST.format(more="").replace("<properties>", "<skipped/><properties>")
    (tmp_path / "pytest").mkdir()
    (tmp_path / "pytest" / "test_streams.xml").write_text(skipped)
    assert run(sys.executable, ".ci/gpu_report.py", str(tmp_path)).returncode == 1


def test_a_report_of_nothing_fails(tmp_path):
    assert gpu_report.collect(tmp_path)["parts"] == {}
    assert run(sys.executable, ".ci/gpu_report.py", str(tmp_path)).returncode == 1


def test_the_kit_s_package_files_serve_cmake(tmp_path):
    """Boost and GoogleTest are found in a kit, and a program that uses both is configured."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake on PATH")
    kit = tmp_path / "kit"
    shutil.copytree(gpu_kit.CONFIGS, kit / "cmake")
    (kit / "include" / "boost").mkdir(parents=True)
    (kit / "include" / "boost" / "version.hpp").write_text('#define BOOST_LIB_VERSION "1_74"\n')
    (kit / "googletest" / "src").mkdir(parents=True)
    (kit / "googletest" / "include").mkdir()
    for name in ("gtest-all.cc", "gtest_main.cc"):
        (kit / "googletest" / "src" / name).touch()
    (tmp_path / "CMakeLists.txt").write_text("""
cmake_minimum_required(VERSION 3.25)
project(uses LANGUAGES CXX)
find_package(Boost 1.74 REQUIRED)
find_package(GTest REQUIRED)
message(STATUS "Boost ${Boost_VERSION} in ${Boost_INCLUDE_DIRS}")
file(WRITE main.cc "int main() {}")
add_executable(main main.cc)
target_link_libraries(main PRIVATE Boost::headers GTest::gtest GTest::gtest_main)
""")
    folder = str(kit / "cmake")
    shown = run(
        "cmake", "-S", str(tmp_path), "-B", str(tmp_path / "b"), f"-DBoost_DIR={folder}", f"-DGTest_DIR={folder}"
    )
    assert shown.returncode == 0, shown.stderr
    assert f"Boost 1.74 in {folder}/../include" in shown.stdout
