"""What differs on vLLM's V2 model runner, used on GPUs."""
