"""One rank of a training with torch's fully_shard (test_fully_shard.py): LoRA on a packed base beside the plain one.

    torchrun --nproc-per-node 2 tests/integrations/sharded_ranks.py FOLDER DEVICE

FOLDER has a plain model. What a rank found goes to FOLDER/<rank>.pt: for each way to shard, of the plain and of the
packed model, the logits behind some steps, the adapters, and the bytes held.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from transformers import AutoModelForCausalLM

import samebits
from samebits.errors import InputError
from tests.integrations.models import MIN_WEIGHTS, VOCABULARY
from tests.integrations.torchrun import RANKS, leave

STEPS = 4
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shards_bytes() -> bool:
    """Whether this torch's fully_shard takes parameters of integers (2.13 does, 2.11 not; pytorch issue 177844)."""
    return "requires_grad=param.requires_grad" in inspect.getsource(_fsdp_param.FSDPParam._init_sharded_param)


class Parameter(nn.Parameter):
    """With no gradient where there can be none, which older torch forgets for what it shards."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return nn.Parameter(data, requires_grad and data.is_floating_point())


if not shards_bytes():
    _fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=Parameter)

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "kept after forward": {"reshard_after_forward": False},
    **({"mixed precision": {"mp_policy": MIXED}} if shards_bytes() else {}),  # older torch makes BF16 of integers too
    "checkpointing": {},
    "packed weights ignored": {},
}


def trained(folder: Path, device: str, way: str, packed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    config = {"quantization_config": samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)} if packed else {}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **config).to(device)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    if way == "checkpointing":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    options = dict(WAYS[way])
    if way == "packed weights ignored":
        options["ignored_params"] = {each for each in model.parameters() if each.dtype is torch.uint8}
    mesh = init_device_mesh(device, (RANKS,))
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(model.state_dict())
    refused = refusal(base.model.layers[0].self_attn.q_proj.base_layer)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {
        "refused": refused, "logits": logits.cpu(),
        "adapters": {name: each.cpu() for name, each in state.items() if "lora_" in name},
        "held": sum(local(each).nbytes for each in model.parameters()),
    }  # fmt: skip


def refusal(layer: nn.Linear) -> str:
    """What is said where a weight is asked for that is not whole here."""
    try:
        layer.weight.sum()
    except InputError as error:
        return str(error)
    return ""


def local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {way: {form: trained(folder, device, way, form) for form in (False, True)} for way in WAYS}
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
