"""Report on a catalogue: `python -m data.check DIR`. The code is in `webshop_env.datatools.check`."""

from __future__ import annotations

import sys

from webshop_env.datatools.check import CHECK

if __name__ == "__main__":
    sys.exit(CHECK.main())
