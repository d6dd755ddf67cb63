"""What the processes of one node share: cores, weights in shared memory, and Ray on this node.

`cores` binds every process to its own cores. `weights` hands weights over through shared memory,
and `fingerprint` proves that they arrived. `cluster` starts Ray and ends its actors.
"""
