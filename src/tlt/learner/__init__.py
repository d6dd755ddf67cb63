"""The policy update, on FSDP2 ranks; `sft` is the supervised start before RL."""
