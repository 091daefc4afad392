import sys
from pathlib import Path

# The report is a package of its own, `tests.gpu`, which `python -m` finds from the repo's root.
sys.path.append(str(Path(__file__).resolve().parents[2]))
