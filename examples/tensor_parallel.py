"""torchrun --nproc-per-node 2 examples/tensor_parallel.py MODEL PROMPT"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import samebits

if len(sys.argv) != 3:
    sys.exit(f"usage: {__doc__}")
folder, prompt = sys.argv[1:]
parts = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
model = AutoModelForCausalLM.from_pretrained(
    folder, distributed_config=parts, dtype=torch.bfloat16, quantization_config=samebits.SamebitsConfig()
)
samebits.prepare(model)
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)
if torch.distributed.get_rank() == 0:
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))
torch.distributed.destroy_process_group()
