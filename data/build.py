"""Build what a catalogue needs: `python -m data.build DIR`. The code is in `webshop_env.datatools.build`."""

from __future__ import annotations

import sys

from webshop_env.datatools.build import BUILD

if __name__ == "__main__":
    sys.exit(BUILD.main())
