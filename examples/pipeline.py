import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from examples.diffusion_pipeline import tiny_pipeline

import samebits

source = "tiny-flux"  # any pipeline with BF16 weights, from a folder or the hub
tiny_pipeline().save_pretrained(source)
parts = dict.fromkeys(["transformer", "text_encoder_2"], samebits.SamebitsConfig(min_weights=1024))
config = PipelineQuantizationConfig(quant_mapping=parts)
pipeline = DiffusionPipeline.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
pipeline.save_pretrained("tiny-flux-samebits")
pipeline = DiffusionPipeline.from_pretrained("tiny-flux-samebits", dtype=torch.bfloat16)  # loads as any pipeline does
result = pipeline("And it came to pass", height=32, width=32, num_inference_steps=2, max_sequence_length=16)
result.images[0].save("picture.png")
