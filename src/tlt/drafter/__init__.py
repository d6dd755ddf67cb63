"""The drafter: a one-layer EAGLE-3 model in the layout that vLLM loads.

`eagle3/` holds the model with its loss, and its config. `passes` packs captured samples
(`tlt.states`) into rows and computes the drafter and the policy's head over a row. On it build
`trainer`, which learns in short sessions, and `evaluation`, which measures and compares acceptance
lengths.
`vocabulary` chooses the tokens that may be drafted, `checkpoint` stores versions, and `export`
writes folders for deployment.
"""
