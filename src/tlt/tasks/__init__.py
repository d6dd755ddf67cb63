"""Prompts and verifiable rewards.

`source` gives each RL step its problems, from `gym` (tasks of `reasoning-gym`) or `file` (JSONL,
parquet). `word_problems` is a task of our own, told by `stories`. `rewards` scores responses in
worker processes. `tail` draws heavy-tailed sizes, `worked` writes out the steps of a solution, and
`chat` turns text into a model's tokens.
"""
