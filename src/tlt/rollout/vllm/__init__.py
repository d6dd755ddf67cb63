"""The plug-in for stock vLLM, and the only package that imports vLLM.

vLLM loads `plugin` in every engine process. `core` starts and steps an engine; `args` are its
arguments. `scheduler` chooses the arm of every engine step; `worker` and `proposer` switch the
drafter. `history`, `history_kernels` and `lookup` draft from earlier samples. `catch_up` keeps the
inputs that the draft model skipped. `transfer` loads weights, and `watch` compares them. `recorder`
keeps hidden states. `sampler` draws the tokens of CPU engines by keyed noise. `compat` works around
faults of vLLM, and `selftest` checks sampling.
"""
