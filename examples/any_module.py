import torch
from torch import nn

import samebits

layers = [nn.Conv2d(3, 64, 7, 4), nn.Flatten(2), nn.TransformerEncoderLayer(196, 4), nn.Linear(196, 1000)]
module = nn.Sequential(*layers).to(torch.bfloat16).eval()
images = torch.randn(2, 3, 60, 60).to(torch.bfloat16)
expected = module(images)
print(samebits.compress(module, exclude=["0.*"]))  # in place; says what was packed, what not, and why
assert torch.equal(module(images).view(torch.int16), expected.view(torch.int16))
samebits.decompress(module)
