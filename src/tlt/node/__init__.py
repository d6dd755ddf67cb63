"""What the processes of one node share: cores, weights in shared memory, and Ray on this node.

`cores` binds every process to cores of its own; `weights` hands weights over through shared
memory; `fingerprint` proves that they arrived; `cluster` starts Ray and ends its actors.
"""
