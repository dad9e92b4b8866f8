"""One rank of a model that transformers splits (test_parallel.py): what it computes and holds, kept in a file.

    torchrun --nproc-per-node 2 tests/integrations/ranks.py FOLDER NAME...

FOLDER has for each NAME the folders NAME/plain and NAME/packed of one model; NAME/saved is written. What a
rank found goes to FOLDER/<rank>.pt: by name and source, logits, tokens, and the words and bytes of each packed weight.
In the end examples/tensor_parallel.py runs on FOLDER/example.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.distributed import DistributedConfig

import samebits
from samebits.errors import InputError
from samebits.nn.packed_module import packed_parameters
from tests.integrations.models import MIN_WEIGHTS, VOCABULARY, outputs
from tests.integrations.torchrun import RANKS, leave

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel.py"
PROMPT = "In the beginning"


def load(folder: Path, **options: Any) -> Any:
    parts = DistributedConfig(tp_size=RANKS)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=parts, **options)


def found(model: Any) -> dict[str, Any]:
    """What there is to compare of one model."""
    device = next(model.parameters()).device
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    logits, continuation = outputs(model, tokens)
    packed = {
        name: (module.sb_recipes[leaf].shape, sum(stored.nbytes for stored in module.sb_data(leaf)))
        for name, module, leaf in packed_parameters(model)
    }
    with_gradients = model(tokens).logits.detach()
    return {
        "logits": logits.cpu(), "tokens": continuation.cpu(), "with_gradients": with_gradients.cpu(), "packed": packed,
    }  # fmt: skip


def refusal(model: Any) -> str:
    """What is said where an adapter is put on a model, and which of its modules have one then."""
    try:
        get_peft_model(model, LoraConfig(target_modules=["embed_tokens", "v_proj"]))
    except InputError as error:
        return f"{error} {[name for name, module in model.named_modules() if hasattr(module, 'lora_A')]}"
    return ""


def run(folder: Path) -> dict[str, Any]:
    result = {"plain": found(load(folder / "plain"))}
    config = samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)
    result["while loading"] = found(load(folder / "plain", quantization_config=config))
    model = load(folder / "packed")
    result["refusal"] = refusal(model)
    result["from a folder"] = found(model)
    model.save_pretrained(folder / "saved")
    model.dequantize()
    result["dequantized"] = found(model)
    return result


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    result = {name: run(folder / name) for name in names}
    torch.save(result, folder / f"{os.environ['RANK']}.pt")
    sys.argv[1:] = str(folder / "example"), PROMPT
    runpy.run_path(str(EXAMPLE))
    leave()


if __name__ == "__main__":
    main()
