"""Makes this folder importable, so that tests and the ranks they start share ``ddp_models``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
