"""Rollouts: a pool of stock vLLM engines with lossless, switchable speculation.

`dispatch` decides which engine generates what (pure), and `pool` carries that out. `engine` is one
vLLM engine: `loop` steps it without vLLM, and `vllm/core` is vLLM's half. `actor` puts an engine
in a Ray process, and `offline` in a child process. `keyed` draws tokens, `guard` refuses lossy
settings, and `vllm/` holds the plug-in.
"""
