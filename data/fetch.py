"""Fetch WebShop's public files: `python -m data.fetch DIR`. The code is in `webshop_env.datatools.fetch`."""

from __future__ import annotations

import sys

from webshop_env.datatools.fetch import FETCH

if __name__ == "__main__":
    sys.exit(FETCH.main())
