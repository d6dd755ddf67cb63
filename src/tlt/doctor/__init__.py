"""What works on this machine: `tlt doctor`, and with `--gpu` checks of real engines on a device.

`machine` finds out about hardware and packages. `sameness`, `lifecycle` and `training` check
engines, and tests run these checks on CPU engines. `isolated` gives each check a process of its
own. `report` runs all checks and writes their results.
"""
