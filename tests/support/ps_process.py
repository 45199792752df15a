"""`python -m springtide_ps` for processes that are forked."""

import sys

from springtide_ps.__main__ import main

if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    sys.exit(main())
