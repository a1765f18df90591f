"""``init_process_group("farandole")`` with no import of farandole, and what a broken installation does."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import farandole
import farandole_autoload
from support.devices import only_on_cpu

pytestmark = only_on_cpu("it is the same whatever the device")

ONLY_TORCH = """
    import torch, torch.distributed as dist
    dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(3)
    dist.all_reduce(x)
    print(x.tolist(), type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__)
    dist.destroy_process_group()
"""


@pytest.fixture
def site(tmp_path):
    """A folder as site-packages looks after an installation: the modules and the entry points."""

    def make(package=None):
        info = tmp_path / "farandole-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: farandole\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(
            "[torch.backends]\nfarandole = farandole_autoload:autoload\n"
            "[torch.distributed.backends]\nfarandole = farandole_autoload:register\n"
        )
        (tmp_path / "farandole_autoload.py").symlink_to(Path(farandole_autoload.__file__).resolve())
        if package is None:
            (tmp_path / "farandole").symlink_to(Path(farandole.__file__).parent)
        else:
            (tmp_path / "farandole").mkdir()
            (tmp_path / "farandole" / "__init__.py").write_text(package)
        return tmp_path

    return make


def _run(site, script, **env):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(site), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_script_that_imports_only_torch_finds_the_backend(site):
    result = _run(site(), ONLY_TORCH)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[1.0, 1.0, 1.0] ProcessGroupFarandole"


def test_the_backend_is_not_loaded_before_a_group_is_made(site):
    result = _run(site(), "import torch, sys; print('farandole' in sys.modules, 'farandole_autoload' in sys.modules)")
    assert result.stdout.strip() == "False True", result.stderr


@pytest.mark.parametrize("broken", ["raise RuntimeError('half an installation')", "import no_such_module"])
def test_a_broken_installation_breaks_neither_torch_nor_other_backends(site, broken):
    result = _run(
        site(package=broken),
        """
        import torch, torch.distributed as dist
        print("imported", torch.ones(2).sum().item())
        try:
            dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
        except (RuntimeError, ImportError) as error:
            print("told:", error)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print("gloo works")
        """,
    )
    assert result.returncode == 0, result.stderr
    assert "imported 2.0" in result.stdout and "gloo works" in result.stdout
    assert "told: half an installation" in result.stdout or "told: No module named 'no_such_module'" in result.stdout


def test_the_module_that_torch_loads_imports_the_standard_library_only():
    script = f"""
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] not in sys.stdlib_module_names and name != "farandole_autoload":
                    raise AssertionError(name)
        sys.meta_path.insert(0, Refuse())
        sys.path.insert(0, {str(Path(farandole_autoload.__file__).parent)!r})
        import farandole_autoload
        print("clean")
    """
    result = _run("", script)
    assert result.stdout.strip() == "clean", result.stderr


def test_ucx_may_be_in_another_folder_than_farandole(tmp_path):
    """As in a virtual environment that sees the packages of the system."""
    build = Path(farandole._C.__file__).parents[2]
    [cmake] = re.findall(r"(?m)^CMAKE_COMMAND:INTERNAL=(.*)$", (build / "CMakeCache.txt").read_text())
    subprocess.run([cmake, "--install", build, "--prefix", tmp_path], check=True, timeout=60, stdout=subprocess.DEVNULL)
    built = shutil.ignore_patterns("_C*.so", "_build_info.py", "__pycache__")
    shutil.copytree(Path(farandole.__file__).parent, tmp_path / "farandole", dirs_exist_ok=True, ignore=built)
    shutil.copy(farandole_autoload.__file__, tmp_path)
    result = _run(tmp_path, "import farandole; print(farandole.__file__)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "farandole" / "__init__.py")


def test_a_torch_of_another_minor_version_is_refused_by_name():
    with pytest.raises(ImportError, match=r"built for torch \d+\.\d+, but torch 1\.13\.0 is installed"):
        farandole._build.check("1.13.0")
