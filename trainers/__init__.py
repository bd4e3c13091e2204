"""GiGPO training of text agents: advantages, losses, a sharded actor, checkpoints, evaluation, imitation."""

import sys
from importlib.util import find_spec
from pathlib import Path

_MISSING = [name for name in ("yaml", "pyarrow", "torch", "transformers") if find_spec(name) is None]
if _MISSING:
    _WHY = f"training needs {', '.join(_MISSING)}: pip install 'shopgym[train]'"
    if sys.argv[0] == "-m" or Path(sys.argv[0]).parent.name in ("trainers", "data"):  # a command: no traceback
        print(f"error: {_WHY}", file=sys.stderr)
        sys.exit(2)
    raise ModuleNotFoundError(_WHY)
