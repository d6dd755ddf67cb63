"""Commands that work outside of an RL run: `tlt sft`, `tlt drafter train` and `tlt eval`."""
