"""Agents: policies that call the tools of an environment, over several turns.

`environment` defines what a user's class must provide, and calls it. `host` does that in separate
processes, and writes every answer to the `journal` before it is used. `dialogue` turns a sample's
turns and the environment's answers into one text, which engines continue. `scoring` calls rewards
that look at the environment. `openenv` makes environments of servers. `vllm.tool_calls` reads the
calls of models that do not write JSON between tags.
"""
