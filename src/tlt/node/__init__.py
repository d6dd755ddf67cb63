"""What the processes of one node share: cores, shared memory, weights in it, and Ray on this node.

`cores` binds every process to its own cores. `shared` makes folders in shared memory, private to a
user and alive while a process holds them. `weights` hands weights over through such folders, and
`fingerprint` proves that they arrived. `cluster` starts Ray and ends its actors.
"""
