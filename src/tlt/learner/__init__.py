"""Training of the policy. `sft` gives it a short supervised start."""
