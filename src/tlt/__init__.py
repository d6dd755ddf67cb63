"""TLT: fast, lossless RL training of reasoning LLMs on stock vLLM, Ray and PyTorch."""

__version__ = "0.1.0"
