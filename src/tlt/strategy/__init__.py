"""Which way to decode: arms and the strategies that choose among them. Pure logic.

Neither torch, vLLM nor Ray is imported here, so that the engine's scheduler, the simulator and
the tests all run the very same decisions.
"""
