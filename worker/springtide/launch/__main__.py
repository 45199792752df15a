"""`python -m springtide.launch`: the same as `springtide launch`, where the command is not on PATH."""

from __future__ import annotations

import sys

from springtide.launch.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
