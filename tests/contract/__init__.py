"""The contract with vLLM: every name of it that our plug-in uses, with its signature."""
