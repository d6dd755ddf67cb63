"""What differs on vLLM's V1 model runner, used on CPUs."""
