"""The drafter: a one-layer EAGLE-3 model in the layout that vLLM loads.

`eagle3/` holds the model, its config and its loss; `checkpoint` reads and writes folders;
`warmup` trains a first drafter offline from the policy's own samples.
"""
