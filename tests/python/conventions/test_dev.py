"""The ./dev script: its help, and what it says when the machine lacks something."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMANDS = sorted(file.stem for file in (ROOT / ".ci" / "commands").glob("*.sh"))


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command from the top of the tree; after a minute all that it started is killed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_without_arguments_it_lists_every_command_with_its_summary():
    shown = run("./dev")
    assert shown.returncode == 0
    for command in COMMANDS:
        [line] = [line for line in shown.stdout.splitlines() if line.startswith(f"  {command} ")]
        assert line.rstrip().endswith("."), line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_says_how_to_use_it(command):
    shown = run("./dev", command, "--help")
    assert shown.returncode == 0
    assert f"usage: ./dev {command}" in shown.stdout


def test_an_unknown_command_is_an_error_that_lists_the_known_ones():
    shown = run("./dev", "tset")
    assert shown.returncode == 2
    assert "no command 'tset'" in shown.stderr
    assert " test " in shown.stderr


@pytest.mark.parametrize("command", ["format", "gpu-kit", "lint", "test", "test-gpu"])
def test_an_unknown_argument_is_refused_before_any_set_up(command):
    shown = run("./dev", command, "--no-such-option")
    assert shown.returncode != 0
    assert "--no-such-option" in shown.stderr
    assert shown.stdout == ""


def test_an_unsupported_torch_is_refused():
    shown = run("bash", "-c", "source .ci/lib/setup.sh; name_variant", ROOT=str(ROOT), FARANDOLE_TORCH_VERSION="2.10.0")
    assert shown.returncode != 0
    assert "2.11.0 to 2.15.0" in shown.stderr


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with the tools of any Debian, and with nothing that compiles."""
    for tool in ("bash", "cat", "echo", "id", "xargs", "readlink", "basename", "git", "dirname", "env"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    (tmp_path / "python3").symlink_to(sys.executable)
    for command in ("apt-get", "sudo"):
        (tmp_path / command).write_text(f'#!{shutil.which("bash")}\necho "called {command}" >&2\nexit 1\n')
        (tmp_path / command).chmod(0o755)
    return str(tmp_path)


def test_missing_system_packages_are_named_with_the_command_that_installs_them(bare_path):
    # As an ordinary user whose sudo asks for a password.
    script = "id() { echo 1000; }; source .ci/lib/setup.sh; ensure_system"
    shown = run("bash", "-c", script, ROOT=str(ROOT), PATH=bare_path)
    assert shown.returncode != 0
    assert "sudo apt-get install -y --no-install-recommends " in shown.stderr
    for package in ("g++", "ccache", "libboost-dev", "libgtest-dev"):
        assert package in shown.stderr


def test_missing_system_packages_are_installed_by_root(bare_path):
    setup = "source .ci/lib/common.sh; source .ci/lib/system.sh"
    script = f"{setup}; id() {{ echo 0; }}; step() {{ echo $1; exit 7; }}; ensure_system"
    shown = run("bash", "-c", script, ROOT=str(ROOT), PATH=bare_path)
    assert shown.returncode == 7
    assert shown.stdout.startswith("install g++")


def test_a_step_that_fails_shows_the_end_of_its_log_and_stops():
    script = "source .ci/lib/common.sh; LOGS=$(mktemp -d); step 'the step' x.log bash -c 'echo detail; exit 3'; echo on"
    shown = run("bash", "-c", script, ROOT=str(ROOT))
    assert shown.returncode == 3
    assert "FAILED: the step" in shown.stderr
    assert "detail" in shown.stderr
    assert "on" not in shown.stdout.split()


def test_a_step_stops_at_the_first_command_that_fails():
    script = "source .ci/lib/common.sh; LOGS=$(mktemp -d); work() { false; echo went on; }; step work x.log work"
    shown = run("bash", "-c", script, ROOT=str(ROOT))
    assert shown.returncode == 1
    assert "went on" not in shown.stderr
