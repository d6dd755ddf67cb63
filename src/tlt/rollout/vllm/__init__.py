"""The plug-in for stock vLLM: the only place that touches vLLM's extension points.

`plugin` is what vLLM loads in every engine process; `compat` handles faults of its CPU build;
`scheduler` chooses a draft length per step; `worker` and `proposer` switch the drafter;
`history`, `ring` and `lookup` draft from earlier samples; `upkeep` keeps what an idle drafter will
have to catch up on; `transfer` receives weights through shared memory.
"""
