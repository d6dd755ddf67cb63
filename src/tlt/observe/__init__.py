"""What a run writes about itself.

`metrics` declares every metric. `record` writes them to disk, one line per RL step. `sinks` sends
them to TensorBoard, Weights & Biases and Prometheus. `timeline` and `stopwatch` record where the
time goes. `summary` is a run in a few numbers. `provenance` says where a result comes from.
"""
