"""One vLLM engine in a process of its own: ``python engine.py OPTIONS``, a JSON object; prints another, what it gave.

Options: ``model``, ``arguments`` of vLLM's LLM, ``prompts`` (lists of tokens), ``prompt_logprobs``; ``adapter``, the
folder of one; ``sleep`` to give back memory and generate once more; ``reload`` or ``update`` to load the weights anew,
by the engine or by its model. ``waiting`` of what it gave are linear layers that were not packed when all was read.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
TOKENS = 12


def values(places: Any) -> list[Any] | None:
    """Log-probabilities as the numbers they are."""
    return places and [place and {token: one.logprob.hex() for token, one in place.items()} for place in places]


def main() -> None:
    from inspected import MARK, fused_experts, read_weights, update, waiting, weights
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader import base_loader

    left: list[str] = []
    original = base_loader.finalize_layerwise_processing

    def finalize(model: Any, *arguments: Any) -> None:
        left.extend(waiting(model))
        original(model, *arguments)

    base_loader.finalize_layerwise_processing = finalize
    options = json.loads(sys.argv[1])
    llm = LLM(options["model"], max_model_len=128, max_num_seqs=4, skip_tokenizer_init=True, **options["arguments"])
    sampling = [
        SamplingParams(
            temperature=number % 2, seed=number, max_tokens=TOKENS, ignore_eos=True, logprobs=3, detokenize=False,
            prompt_logprobs=options["prompt_logprobs"],
        )
        for number in range(len(options["prompts"]))
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in options["prompts"]]
    adapter = LoRARequest("adapter", 1, options["adapter"]) if options["adapter"] else None

    def generate() -> list[Any]:
        return [
            [list(each.outputs[0].token_ids), values(each.outputs[0].logprobs), values(each.prompt_logprobs)]
            for each in llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        ]

    gave = {"outputs": generate(), "waiting": left}
    gave |= {each.__name__: llm.apply_model(each) for each in (weights, read_weights, fused_experts)}
    if options["sleep"]:
        llm.sleep(level=1)
        llm.wake_up()
        gave["again"] = generate()
    if options["reload"]:
        llm.collective_rpc("reload_weights")
    if options["update"]:
        llm.apply_model(update)
    print(MARK + json.dumps(gave), flush=True)


if __name__ == "__main__":
    main()
