import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import samebits

config = samebits.SamebitsConfig()
base = AutoModelForCausalLM.from_pretrained("examples/king-james/model", quantization_config=config)
model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
tokens = torch.randint(0, 3000, (2, 64))
model(tokens, labels=tokens).loss.backward()  # gradients are those of the BF16 base, bit for bit
optimizer.step()
model.save_pretrained("king-james-lora")
