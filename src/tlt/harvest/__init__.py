"""Harvest: workers that have nothing to generate train the drafter until they are needed.

`leases`, `rounds` and `forecast` decide (pure). `coordinator` carries their decisions out (asyncio,
in the driver). `trainer` trains beside an engine (torch), `actor` runs it in a separate process
(Ray). The run talks to `session`.
"""
