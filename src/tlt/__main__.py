"""`python -m tlt` is the `tlt` command."""

from tlt.cli.main import main

main()
