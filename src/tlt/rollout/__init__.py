"""Generates samples: a pool of stock vLLM engines with lossless, switchable speculation.

`dispatch` decides who generates what (pure), `pool` runs it on Ray, `engine` is one vLLM engine
and its loop, `actor` puts that in a Ray process, `weights` carries weights into it, `guard`
refuses what would be lossy, and `vllm/` holds the plug-in.
"""
