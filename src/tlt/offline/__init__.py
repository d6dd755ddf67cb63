"""Commands that train outside of an RL run: `tlt sft` and `tlt drafter train`."""
