"""The `tlt` command. It makes no heavy imports until a command runs."""
