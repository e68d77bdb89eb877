"""`python -m aprefetch`."""

from __future__ import annotations

import sys

from aprefetch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
