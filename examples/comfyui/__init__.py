"""Nodes for ComfyUI: copy this folder to custom_nodes/samebits, and install samebits into ComfyUI's Python.

Compress a diffusion model   writes a compressed copy of a file of models/diffusion_models beside it
Load a compressed model      loads such a file; its weights stay packed, and each is decoded when its layer runs

ComfyUI's own nodes for LoRA go on top of the loader: see README.md.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths

import samebits
from samebits.errors import DtypeError
from samebits.integrations import comfyui

MODELS = "diffusion_models"


class SamebitsLoader:
    """A diffusion model from a compressed file, or from a plain one, with the bits of the plain model.

    With ``keep_packed`` it stays compressed in memory, also with LoRAs on top.
    """

    CATEGORY = "loaders"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        files = folder_paths.get_filename_list(MODELS)
        return {"required": {"file": (files,), "keep_packed": ("BOOLEAN", {"default": True})}}

    def load(self, file: str, keep_packed: bool = True) -> tuple[Any]:
        source = samebits.SingleFile(folder_paths.get_full_path_or_raise(MODELS, file))
        load = comfy.sd.load_diffusion_model_state_dict
        takes_metadata = "metadata" in inspect.signature(load).parameters  # only newer versions of ComfyUI do
        model = load(source.state_dict(), **({"metadata": source.metadata} if takes_metadata else {}))
        if model is None:
            raise ValueError(f"{file}: ComfyUI knows no model with these tensors")
        if keep_packed:
            try:
                print(f"samebits: {comfyui.compress(model)}")
            except DtypeError as error:
                mend = "switch keep_packed off, or choose a file in BF16"
                raise DtypeError(error.what, where=file, mend=mend) from None
        return (model,)


class SamebitsCompressor:
    """A compressed copy of a diffusion model's file; its name, as the loader lists it, is the result."""

    CATEGORY = "loaders"
    FUNCTION = "compress"
    RETURN_TYPES = ("STRING",)
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {"required": {"file": (folder_paths.get_filename_list(MODELS),)}}

    def compress(self, file: str) -> tuple[str]:
        source = Path(folder_paths.get_full_path_or_raise(MODELS, file))
        target = source.with_name(f"{source.stem}-samebits.safetensors")
        code, line = "from samebits.cli import main; main()", ""
        command = [sys.executable, "-c", code, "compress", str(source), str(target)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr or ():  # progress; of a failure the last one says why
                print(line, end="", file=sys.stderr)
        if process.returncode:
            raise RuntimeError(line.strip() or f"samebits compress ended with exit code {process.returncode}")
        return (str(Path(file).with_name(target.name)),)


NODE_CLASS_MAPPINGS = {"SamebitsLoader": SamebitsLoader, "SamebitsCompressor": SamebitsCompressor}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SamebitsLoader": "Load a compressed diffusion model (samebits)",
    "SamebitsCompressor": "Compress a diffusion model (samebits)",
}
