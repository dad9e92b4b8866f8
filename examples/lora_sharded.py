"""torchrun --nproc-per-node 2 examples/lora_sharded.py MODEL OUT"""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import samebits

if len(sys.argv) != 3 or "WORLD_SIZE" not in os.environ:
    sys.exit(f"usage: {__doc__}")
folder, out = sys.argv[1:]
torch.distributed.init_process_group()  # NCCL with GPUs, else Gloo
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
config = samebits.SamebitsConfig()
torch.manual_seed(0)  # the same new adapter everywhere
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).to(device)
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
for layer in base.model.layers:
    fully_shard(layer)  # each process keeps its part of the packed bytes, and gathers a layer's while it runs
fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
torch.manual_seed(1 + torch.distributed.get_rank())  # other texts
tokens = torch.randint(0, 3000, (2, 64), device=device)
model(tokens, labels=tokens).loss.backward()
optimizer.step()
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # by all processes
if torch.distributed.get_rank() == 0:
    model.save_pretrained(out, state_dict=state)
torch.distributed.destroy_process_group()
