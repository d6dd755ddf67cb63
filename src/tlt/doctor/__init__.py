"""Checks of a device with real engines, each in a process of its own, and their report.

`tlt doctor --gpu` runs them. Tests run the same checks on CPU engines.
"""
