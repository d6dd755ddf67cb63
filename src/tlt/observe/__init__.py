"""What a run says about itself.

`metrics` declares every metric; `record` keeps them on disk, one line a step; `sinks` pass them on
to TensorBoard, Weights & Biases and Prometheus; `summary` and `plot` look back at a run.
"""
