"""Simulate TLT on hardware you don't have yet.

`tlt.timing` predicts the time of an engine step, and `workload` the responses of an RL step.
`cluster` plays RL steps in simulated time (`clock`): the production code of strategy, dispatcher
and harvest runs against modelled engines. `calibrate` measures a machine from its runs, and
`scenario` holds a user's settings, which `recipe` reads from a training run's file. `answer` says
what came out, what that assumes, and where the simulator was compared with runs; `published` holds
the runs of others.
"""
