"""What a run writes about itself.

`metrics` declares every metric; `record` keeps them on disk, one line a step; `sinks` pass them on
to TensorBoard, Weights & Biases and Prometheus; `timeline` and `stopwatch` keep where the seconds
went; `summary` is the run in a few numbers; `provenance` says where a result comes from.
"""
