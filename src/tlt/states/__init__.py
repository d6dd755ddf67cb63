"""Hidden states on their way from the policy's passes to the drafter's training.

`captured` holds the states of one sample, `writer` stores them in parallel to the work that
computed them, and `buffer` is the node's store in shared memory, from which trainers read.
"""
