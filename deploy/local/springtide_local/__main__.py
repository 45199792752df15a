"""`python -m springtide_local` is `springtide local`."""

from springtide_local.cli import app

app(prog_name="springtide local")
