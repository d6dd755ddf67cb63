"""How long work takes on given hardware, and how to emulate that time on other hardware.

`model` is the time of an engine step, and `profiles` has its parts for published hardware; the
simulator reads both. `node` puts the times of an emulated node together, and `pace` waits until
they are over: a run then has the timing of that node, and everything else is real.
"""
