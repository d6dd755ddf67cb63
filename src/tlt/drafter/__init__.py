"""The drafter: a one-layer EAGLE-3 model in the layout that vLLM loads.

`eagle3/` holds the model, its config and its loss. `capture` is what it learns from, `keeper` takes
it from whoever computed it, `buffer` holds it in shared memory, `trainer` learns in short sessions,
`vocabulary` chooses what may be drafted, `checkpoint` keeps versions, `export` writes folders for
deployment.
"""
