"""Makes this folder importable, so that tests share ``input_models``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
