"""``python -m torchledger``."""

from __future__ import annotations

import sys

from torchledger.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
