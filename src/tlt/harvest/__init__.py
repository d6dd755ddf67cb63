"""Harvest: workers that have nothing to generate train the drafter until they are needed.

`leases`, `rounds` and `forecast` decide (pure). `coordinator` carries their decisions out (asyncio,
an object of the driver). `trainer` trains beside an engine (torch), `actor` runs it in a process of
its own (Ray). `session` is what the run talks to.
"""
