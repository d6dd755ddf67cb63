"""The plug-in for stock vLLM, and the only package that imports vLLM.

vLLM loads `plugin` in every engine process. `core` starts and steps an engine; `args` are its
arguments. `scheduler` chooses the arm of every engine step. `worker` is what the workers of both
devices share (`cpu_worker`, `gpu_worker`). vLLM has two model runners, V1 on CPUs and V2 on GPUs:
`runner_v1` and `runner_v2` are the differences. The drafter is switched by `proposer` on V1 and by
`speculator` on V2. `history` and `history_kernels` draft from earlier samples, through `lookup` on
V1 and `history_drafts` on V2. `catch_up` keeps the inputs that the draft model skipped. `transfer`
loads weights from shared memory; `send`, `receive` and `device_transfer` move a policy from GPU to
GPU; `watch` compares weights. `recorder` keeps hidden states. `compat` works around faults of vLLM.
Tokens are drawn by keyed noise, through `sampler` on V1 and `sampler_v2` on V2; `selftest` and
`selftest_v2` check that. `draft_noise_v2` draws drafts with the same noise on V2. `wiring` puts all
this into engines of other programs, whose worker is also `embedded`; `arm_metrics` counts there.
"""
