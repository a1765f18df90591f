"""Links a build tree into the environment of the running interpreter.

Writes what an editable install would: the package's metadata (from which torch
reads the entry points) and a .pth file that names the build tree's python/
folder. Nothing is copied, so a rebuild is seen at once.

usage: link_package.py BUILD/python [FOLDER]

FOLDER, which PYTHONPATH will name too, takes the place of the environment's own folder of packages.
"""

import contextlib
import csv
import io
import os
import pathlib
import shutil
import sys
import sysconfig


def main() -> None:
    build = pathlib.Path(sys.argv[1]).resolve()
    if not list(build.glob("farandole/_C*.so")):
        sys.exit(f"link_package: {build} holds no built farandole/_C")
    root = pathlib.Path(__file__).resolve().parent.parent
    site = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else sysconfig.get_paths()["platlib"]).resolve()
    pth = site / "farandole.pth"
    source = root / "pyproject.toml"
    old = list(site.glob("farandole-*.dist-info"))
    current = len(old) == 1 and old[0].stat().st_mtime >= source.stat().st_mtime
    if current and pth.is_file() and pth.read_text().strip() == str(build):
        return

    from scikit_build_core.build import prepare_metadata_for_build_wheel

    for folder in old:
        shutil.rmtree(folder)
    os.chdir(root)
    with contextlib.redirect_stdout(io.StringIO()):
        info = site / prepare_metadata_for_build_wheel(str(site))
    pth.write_text(f"{build}\n")
    (info / "INSTALLER").write_text("farandole-dev\n")
    files = [pth, *(path for path in info.rglob("*") if path.is_file()), info / "RECORD"]
    with (info / "RECORD").open("w", newline="") as record:
        csv.writer(record).writerows([path.relative_to(site).as_posix(), "", ""] for path in files)


if __name__ == "__main__":
    main()
