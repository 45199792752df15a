"""`python -m springtide_demo`."""

import sys

from springtide_demo.main import main

if __name__ == "__main__":
    sys.exit(main())
