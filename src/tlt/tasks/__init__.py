"""What the policy is asked, and how its answers are scored.

`source` gives each step its problems, from `gym` (tasks of `reasoning-gym`) or `file` (JSONL,
parquet); `rewards` scores responses in processes of their own. `tail` draws heavy-tailed sizes;
`worked` writes out the steps of a solution; `chat` turns text into the tokens a model is given.
"""
