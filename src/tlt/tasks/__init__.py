"""What the policy is asked: problems, their worked solutions, how long they run.

`tail` draws heavy-tailed sizes; `gym` makes problems of `reasoning-gym` in such sizes; `worked`
writes out the steps of a solution; `chat` turns text into the tokens a model is given.
"""
