"""What TLT would bring on a cluster that is not here.

`model` says how long an engine step takes, `workload` which responses are wanted, `cluster` plays
RL steps in simulated time, with the production code of strategy and harvest against modelled
engines; `profiles` holds hardware, `calibrate` learns it from runs, `scenario` is what a user asks.
"""
