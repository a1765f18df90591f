"""docs/settings.md names what the backend reads, and nothing else."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[3]
READ = re.compile(r'"(FARANDOLE_[A-Z_]+)"')
ROW = re.compile(r"^\| `(FARANDOLE_[A-Z_]+)` \|", re.MULTILINE)


def test_the_page_of_settings_names_all_that_the_backend_reads():
    sources = [path for ending in ("cc", "h") for path in (ROOT / "backend").rglob(f"*.{ending}")]
    read = {name for path in sources for name in READ.findall(path.read_text())}
    assert len(read) > 3
    assert read == set(ROW.findall((ROOT / "docs" / "settings.md").read_text()))
