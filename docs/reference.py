"""Write docs/reference.md: every public name, from its signature and its docstring.

python docs/reference.py            rewrite the page
python docs/reference.py --check    exit code 1 if it says something else than the docstrings
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docstring_parser import Docstring, DocstringStyle, parse

import samebits
from samebits import errors
from samebits.integrations import comfyui
from samebits.nn.convert import Report
from samebits.nn.offload import Offloaded
from samebits.nn.prepare import Preparation

WIDTH = 100  # of a signature on one line
PAGE = Path(__file__).with_name("reference.md")
PACKED = ("shape", "device", "words", "nbytes", "bits_per_weight", "is_raw", "to", "from_data")
FILE = ("state_dict", "packed_state_dict")
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # of names, and what of a class is public
    "Tensors": {"encode": (), "decode": (), "PackedTensor": PACKED},
    "Models": {
        "SamebitsConfig": (), "compress": (), "Report": ("bits_per_weight", "to_json"), "decompress": (),
        "load_state_dict": (),
    },
    "On a GPU": {
        "prepare": (), "Preparation": ("fused", "fallback"), "cuda_graphs": (), "offload": (),
        "Offloaded": ("device_bytes",), "onload": (), "PackedCache": ("nbytes",),
    },
    "Files": {"SingleFile": FILE},
}  # fmt: skip
RETURNED = {kind.__name__: kind for kind in (Report, Preparation, Offloaded)}
ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SamebitsError) and kind is not errors.SamebitsError
]
HEAD = """# Reference

Every public name, made of the docstrings by `python docs/reference.py`. Names and attributes that do not stand here may
change with any version. Commands and environment variables are in [usage.md](usage.md#the-command-line), the bytes in
[FORMAT.md](../FORMAT.md), words [below](#words).

`from_pretrained` of transformers and diffusers takes what it always does. For models of transformers that is also

- `quantization_config=samebits.SamebitsConfig()`: a BF16 checkpoint is packed while it is loaded
  ([usage.md](usage.md#models-with-transformers); likewise in [diffusers](diffusers.md))
- `gpu_memory="24GiB"`: what fits stays on the card, the rest is streamed ([offload.md](offload.md))
- `keep_format=True`: a DFloat11 checkpoint runs in its own layout ([df11.md](df11.md#run-one-in-its-own-layout))
"""
KINDS = """Each is a `SamebitsError`, in `samebits.errors`:
"""
PATCHED = """`samebits.integrations.comfyui` does the same for models of ComfyUI, with layers that its LoRA nodes patch
([modules.md](modules.md#comfyui)):
"""
TERMS = """## Words

- **word**: the 16 bits of one BF16 value: sign, eight bits of exponent, seven of mantissa.
- **packed**: of a tensor or a parameter: exponents Huffman-coded, signs and mantissas as they are. **Raw**: left as it
  is, since it would not get smaller. **Plain**: not packed.
- **decode**: make the words again. **Fused**: a product that decodes what it needs on the way and stores no weight.
  **Decoded first**: the weight is decoded to memory, and cuBLAS multiplies.
- **plan**: which fused product has the bits of cuBLAS for one shape, number of tokens and state of torch, or
  that none has ([plans.md](plans.md)).
- **tokens**, of a product: rows of its input; in a step of generation one for each sequence.
- **row group**, **stage**, **chunk**, **lane**: how a packed matrix is divided ([FORMAT.md](../FORMAT.md)).
- **digest**: by which damage is noticed, of the packed bytes and of the words.
- **streamed**: of weights: kept packed in main memory, and copied to the GPU for each use.
"""


def page() -> str:
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name, members in names.items():
            parts += described(name, RETURNED[name] if name in RETURNED else getattr(samebits, name), members)
    parts += [PATCHED, *described("integrations.comfyui.compress", comfyui.compress)]
    parts += ["## Errors\n", *described("SamebitsError", errors.SamebitsError), KINDS]
    parts += [f"- `{kind.__name__}`{of_base(kind)}: {markdown(of(kind).short_description)}" for kind in ERRORS]
    return "\n".join([*parts, "", TERMS])


def described(name: str, value: Any, members: Sequence[str] = ()) -> Iterator[str]:
    """A function or a class."""
    is_made = value in (*RETURNED.values(), samebits.PackedTensor)  # by functions alone
    yield f"### {name if name in RETURNED else f'samebits.{name}'}\n"
    if not is_made:
        yield f"```py\n{signature(value.__name__, value)}\n```\n"
    found = of(value)
    yield from (f"{markdown(text)}\n" for text in (found.short_description, found.long_description) if text)
    yield from block("", entries(found, "param"))
    yield from block("Attributes", [*entries(found, "attribute"), *(of_member(value, member) for member in members)])
    yield from (f"Returns: {markdown(entry.description)}\n" for entry in found.meta if entry.args[0] == "returns")
    yield from block("Raises", entries(found, "raises"))


def entries(found: Docstring, kind: str) -> list[str]:
    """Lines of a section; its names may share one."""
    lines = [(entry.args[1].replace(", ", "`, `"), entry.description) for entry in found.meta if entry.args[0] == kind]
    return [f"- `{names}`: {markdown(said)}" for names, said in lines]


def block(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from [*([f"{title}:\n"] if title else []), *lines, ""]


def of_member(kind: type, name: str) -> str:
    """A line for a property or a method."""
    value = getattr(kind, name)
    shown = name if isinstance(value, property) else signature(name, value, is_wrapped=False)
    return f"- `{shown}`: {markdown(of(value).short_description)}"


def of_base(kind: type) -> str:
    [base] = kind.__bases__
    return "" if base is errors.SamebitsError else f" (a `{base.__name__}`)"


def of(value: Any) -> Docstring:
    return parse(inspect.getdoc(value) or "", DocstringStyle.GOOGLE)


def markdown(text: str | None) -> str:
    """Paragraphs of a docstring, each on a line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", (text or "").strip()).replace("``", "`")


def signature(name: str, value: Any, *, is_wrapped: bool = True) -> str:
    """As in the source."""
    found = inspect.signature(value)
    parameters = [each for each in found.parameters.values() if each.name != "self"]
    shown = [shown_parameter(each) for each in parameters]
    kinds = [each.kind for each in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    gives = "" if isinstance(value, type) else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(shown)}){gives}"
    if len(line) <= WIDTH or not is_wrapped:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){gives}"])


def shown_parameter(parameter: inspect.Parameter) -> str:
    """Its annotation is a text, which inspect shows in quotes."""
    return str(parameter).replace(repr(parameter.annotation), str(parameter.annotation))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    text = page()
    if not is_check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print("docs/reference.md: other than the docstrings; run `python docs/reference.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
