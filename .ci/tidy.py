"""Runs clang-tidy over the C++ sources, and remembers what it has passed.

usage: tidy.py --jobs N [--all] [FILE...]

It has a configuration of its own (build/tidy) without precompiled headers, which
clang cannot read when gcc made them. A file is skipped when it has passed before
with the same content, headers (the project's) and settings. A file that includes
torch is checked for naming and for the commonest mistakes only: all checks take
most of a minute there, which they spend in torch's headers.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tidy"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
NOISE = re.compile(r"\d+ warnings? .*generated\.$|Error while processing ")
SECONDS_FOR_A_FILE = 600
TORCH_CHECKS = (
    "-*,readability-identifier-naming,bugprone-use-after-move,performance-unnecessary-value-param,"
    "modernize-use-override,cppcoreguidelines-virtual-class-destructor,misc-definitions-in-headers"
)


def configure(tool_folder: pathlib.Path) -> None:
    environment = dict(os.environ, PATH=f"{tool_folder}:{os.environ['PATH']}")
    command = [str(tool_folder / "cmake"), "--preset", "debug", "-B", str(BUILD), "-DFARANDOLE_BENCHMARKS=ON",
               "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON", f"-DPython3_EXECUTABLE={sys.executable}"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"tidy: cmake failed:\n{done.stdout}{done.stderr}")


def sources() -> dict[pathlib.Path, str]:
    """The project's own source files, each with the command that compiles it."""
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    commands = {pathlib.Path(entry["file"]).resolve(): entry["command"] for entry in entries}
    return {file: commands[file] for file in sorted(commands) if ROOT in file.parents and BUILD not in file.parents}


def closure(file: pathlib.Path, seen: set[pathlib.Path]) -> set[pathlib.Path]:
    """The file and the headers of the project that it includes, directly or not."""
    if file not in seen and file.is_file():
        seen.add(file)
        for name in INCLUDE.findall(file.read_text()):
            closure(ROOT / name, seen)
    return seen


def key(file: pathlib.Path) -> str:
    parts = [ROOT / ".clang-tidy", pathlib.Path(__file__), *sorted(closure(file, set()))]
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts) + str(file).encode()).hexdigest()


def check(tool: str, file: pathlib.Path, command: str) -> tuple[pathlib.Path, float, str]:
    start = time.monotonic()
    checks = [f"--checks={TORCH_CHECKS}"] if "/torch/include" in command else []
    try:
        done = subprocess.run(
            [tool, "--quiet", *checks, "-p", str(BUILD), str(file)],
            capture_output=True,
            text=True,
            timeout=SECONDS_FOR_A_FILE,
        )
        text = "" if done.returncode == 0 else done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        text = f"{file}: clang-tidy took more than {SECONDS_FOR_A_FILE} s"
    return file, time.monotonic() - start, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()

    tool = shutil.which("clang-tidy-14") or shutil.which("clang-tidy")
    if tool is None:
        sys.exit("tidy: no clang-tidy in PATH")
    configure(pathlib.Path(sys.executable).parent)
    passed = BUILD / "passed"
    if arguments.all:
        shutil.rmtree(passed, ignore_errors=True)
    passed.mkdir(parents=True, exist_ok=True)
    commands = sources()
    files = [file.resolve() for file in arguments.files] or list(commands)
    pending = {file: mark for file in files if not (mark := passed / key(file)).exists()}
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(check, tool, file, commands[file]) for file in pending]
        for run in concurrent.futures.as_completed(runs):
            file, seconds, text = run.result()
            if text:
                bad += 1
                print("\n".join(line for line in text.splitlines() if not NOISE.match(line)), flush=True)
            else:
                pending[file].touch()
                print(f"  {seconds:5.1f} s  {file.relative_to(ROOT)}", flush=True)
    print(f"  clang-tidy: {len(files)} files, {len(files) - len(pending)} passed before, {bad} with complaints")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
