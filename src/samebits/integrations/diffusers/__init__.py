"""diffusers: packed models and pipelines loaded, saved and given LoRAs."""
