"""The `tlt` command: thin, and free of heavy imports until a command runs."""
