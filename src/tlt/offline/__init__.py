"""Commands that work outside of an RL run: `tlt models sft`, `tlt drafter train` and `tlt eval`."""
