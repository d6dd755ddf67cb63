"""The plug-in for stock vLLM, and the only package that imports vLLM.

vLLM loads `plugin` in every engine process. `core` starts and steps an engine; `args` are its
arguments, and `lossless_checks` refuses arguments that could change samples. `scheduler` chooses
the arm of every engine step. `worker` is for GPU engines, `cpu_worker` for CPU engines. `catch_up`
keeps the inputs that the draft model skipped, and `recorder` the hidden states that drafters learn
from. `transfer` and `send` bring weights in; `policy_verifier` proves that they arrived. `switch`,
`wiring` and `embedded` put TLT into the engines of other programs.

vLLM has two model runners. `runner` is what they have in common, and `v1/` and `v2/` hold what
differs: runner, sampler, drafting, self-test. `ngram/` drafts from the texts of samples. `keyed`
says how a token is drawn.
"""
