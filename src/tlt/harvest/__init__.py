"""Harvest: workers that have nothing to generate train the drafter until they are needed.

`leases` and `forecast` decide (pure). `coordinator` carries leases out and `rounds` lets the leased
trainers work together (asyncio, an object of the driver). `trainer` trains beside an engine
(torch), `actor` runs it in a process of its own (Ray). `session` is what the run talks to.
"""
