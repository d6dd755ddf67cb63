"""Strategies choose the arm of each engine step: a drafter and a draft length. Pure logic.

Start with `spec`: it names the kinds of strategies, builds them, and holds the simple ones.
`adaptive` finds the best arm with the estimates of `acceptance` and `step_time`; `beg_mab` is the
bandit of the TLT paper. `controller` runs a strategy step by step inside the scheduler. `graphs`
plans the CUDA graphs of all arms.

No module here imports torch, vLLM or Ray: the engine's scheduler, the simulator and the tests all
run the same decisions.
"""
