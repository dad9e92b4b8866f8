"""torchrun --nproc-per-node 2 examples/tensor_parallel.py MODEL PROMPT"""

import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import samebits

if len(sys.argv) != 3:
    sys.exit(f"usage: {__doc__}")
folder, prompt = sys.argv[1:]
if "WORLD_SIZE" not in os.environ:
    sys.exit(f"started without torchrun; {__doc__}")
processes, config = int(os.environ["WORLD_SIZE"]), AutoConfig.from_pretrained(folder).get_text_config()
heads = getattr(config, "num_key_value_heads", processes)
if heads % processes:
    sys.exit(f"{heads} key and value heads cannot be divided between {processes} processes")
parts = DistributedConfig(tp_size=processes)
model = AutoModelForCausalLM.from_pretrained(
    folder, distributed_config=parts, dtype=torch.bfloat16, quantization_config=samebits.SamebitsConfig()
)
samebits.prepare(model)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)
if os.environ["RANK"] == "0":
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
if torch.distributed.is_initialized():  # not by transformers, for a process alone
    torch.distributed.destroy_process_group()
