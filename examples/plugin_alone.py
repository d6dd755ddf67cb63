"""One vLLM engine with TLT's plug-in and a strategy, without Ray or training.

    tlt models tiny --out models/tiny
    python examples/plugin_alone.py models/tiny
    python examples/plugin_alone.py models/policy --drafter models/policy-eagle3

The engine drafts with n-grams, or with an EAGLE-3 drafter where one is given. The strategy chooses
the arm of every engine step.
"""

import argparse
from typing import Any

from tlt import Chat, Engine, EngineConfig, Sample, SampleRequest, SamplingSpec, model_folder

QUESTIONS = ("What is 2 + 3?", "Name a colour.", "Count to ten.", "Say hello.")


def main(model: str, drafter: str | None, strategy: dict[str, Any]) -> None:
    """Generate one response to every question, and print how drafting went."""
    model = str(model_folder(model))
    config = EngineConfig(
        model=model,
        drafter=None if drafter is None else str(model_folder(drafter)),
        strategy=strategy,
        kv_cache_gib=0.25,
        engine_args={"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8},
    )
    chat = Chat(model)
    spec = SamplingSpec(max_tokens=128, temperature=0.7)
    requests = [SampleRequest(q, chat.prompt(q), spec) for q in QUESTIONS]
    engine = Engine(config)
    report = engine.start()
    print(f"vLLM {report['vllm']}, plug-in active: {report['plugin']}, faults: {report['faults']}")
    try:
        engine.submit(requests)
        samples: list[Sample] = []
        while len(samples) < len(requests):
            samples += engine.take_finished(timeout_s=10.0)
        stats = engine.stats()
    finally:
        engine.shutdown()
    for sample in samples:
        print(f"{sample.sample_id!r}: {len(sample.token_ids)} tokens, {sample.finish_reason}")
    print(
        f"{stats.output_tokens} tokens in {stats.steps} engine steps; {stats.drafts} drafts, "
        f"acceptance length {stats.acceptance_length:.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder or Hub id of the policy")
    parser.add_argument("--drafter", help="folder or Hub id of an EAGLE-3 drafter")
    parser.add_argument("--kind", default="adaptive", help="kind of the strategy, such as beg_mab")
    arguments = parser.parse_args()
    main(arguments.model, arguments.drafter, {"kind": arguments.kind})
