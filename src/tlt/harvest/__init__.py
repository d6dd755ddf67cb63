"""Harvest: workers that have nothing to generate train the drafter until they are needed.

`leases` and `forecast` decide (pure), `coordinator` carries decisions out (asyncio), `spot` is the
trainer beside an engine (torch). `run/harvest.py` puts them on Ray and ties them to a training run.
"""
