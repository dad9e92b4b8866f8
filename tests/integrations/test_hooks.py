"""Registration with transformers in either order of imports, at no cost before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samebits.integrations import numbers
from tests.fresh import run_python

REGISTERED = """
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
assert AUTO_QUANTIZER_MAPPING["samebits"].__name__ == "SamebitsQuantizer"
assert AUTO_QUANTIZATION_CONFIG_MAPPING["samebits"] is samebits.SamebitsConfig
"""
WRAPPED = """
from transformers import PreTrainedModel
assert PreTrainedModel._apply.__module__ == "samebits.integrations.transformers.model"
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from samebits.nn.packed_module import packed_class
assert "PackedExperts" in [parent.__name__ for parent in packed_class(MixtralExperts, ("down_proj",)).__mro__]
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import samebits, transformers",
        "import transformers.modeling_utils, samebits",
        "import transformers.quantizers.auto, samebits",
        "import samebits; samebits.SamebitsConfig",
    ],
)
def test_either_order(imports: str) -> None:
    run_python(imports + REGISTERED + WRAPPED)


@pytest.mark.parametrize("imports", ["import samebits, peft", "import peft, samebits", "import peft.tuners, samebits"])
def test_either_order_with_peft(imports: str) -> None:
    wrapped = """
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTuner
for method in (BaseTuner.inject_adapter, BaseTuner._check_merge_allowed, Linear.unmerge):
    assert hasattr(method, "__wrapped__") and not hasattr(method.__wrapped__, "__wrapped__")
"""
    run_python(imports + wrapped)


INTERRUPTED = """
import importlib, sys, samebits
victim, extended, check = sys.argv[1:]
class Once:
    def find_spec(self, name, path, target=None):
        if name == victim:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Once())
try:
    importlib.import_module(extended)
except KeyboardInterrupt:
    importlib.import_module(extended)
    exec(check)
else:
    raise AssertionError("it was not interrupted")
"""


@pytest.mark.parametrize(
    ("victim", "extended", "wrapped"),
    [
        ("transformers.df11", "transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
        ("diffusers.copies", "diffusers.models.modeling_utils", "ModelMixin.save_pretrained"),
        ("diffusers.parts", "diffusers.pipelines.pipeline_utils", "DiffusionPipeline.save_pretrained"),
    ],
)
def test_an_import_that_was_interrupted_is_tried_again(victim: str, extended: str, wrapped: str) -> None:
    """The other library's module is another one then."""
    check = f"import {extended} as module; assert hasattr(module.{wrapped}, '__wrapped__')"
    run_python(INTERRUPTED, f"samebits.integrations.{victim}", extended, check)


def test_samebits_loads_nothing_of_transformers() -> None:
    code = "import sys, samebits; assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # even torch is still to be imported there


def test_transformers_stays_lazy() -> None:
    """Registration waits until the parts that it extends are imported."""
    code = "import samebits, transformers, sys; assert 'samebits.integrations.transformers' not in sys.modules"
    run_python(code)


def test_no_trace_is_left_and_registering_again_changes_nothing() -> None:
    run_python("""
import samebits, transformers.modeling_utils as module, inspect
from samebits.integrations.hooks import register_on_import
assert type(module.__spec__.loader).__name__ == type(module.__loader__).__name__ == "SourceFileLoader"
assert "class PreTrainedModel" in inspect.getsource(module)
before = vars(module.PreTrainedModel).copy()
register_on_import()
assert vars(module.PreTrainedModel) == before
""")


def test_without_samebits_transformers_stops(llama_folder: Path) -> None:
    """It warns that it does not know the quantization, and must not go on with random weights."""
    code = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except OSError as error:
    assert "model.safetensors" in str(error)
else:
    raise SystemExit("a model was made")
assert "samebits" not in sys.modules
"""
    run_python(code, str(llama_folder))


def test_older_versions_are_left_alone() -> None:
    run_python("""
import warnings
from samebits.integrations import hooks
hooks.MINIMUM["transformers"] = "99.0"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import transformers.modeling_utils
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
assert "samebits" not in AUTO_QUANTIZER_MAPPING
[told] = [str(each.message) for each in said if "samebits" in str(each.message)]
assert told == f"samebits needs transformers 99.0 or newer, and leaves {transformers.__version__} alone", told
""")


def test_versions() -> None:
    found = [numbers(version) for version in ("5.17", "5.17.1", "5.17rc1", "6.0.dev0", "unknown")]
    assert found == [(5, 17), (5, 17), (5, 17), (6, 0), ()]


def test_a_plain_pipeline_is_fused_without_peft() -> None:
    run_python("""
import sys, samebits
sys.modules["peft"] = None
from samebits.integrations.diffusers import fuse
from torch import nn
fuse._refuse([nn.Linear(2, 2), None])
assert "samebits.integrations.peft" not in sys.modules
""")


def test_without_transformers_there_is_a_clear_error() -> None:
    run_python("""
import sys, samebits
from samebits.errors import InputError
sys.modules["transformers"] = None
try:
    samebits.SamebitsConfig
except InputError as error:
    assert "pip install 'transformers>=5.17' accelerate" in str(error)
else:
    raise SystemExit("no error")
assert samebits.compress
""")


def test_failing_integration_does_not_hide_its_error(tmp_path: Path) -> None:
    """An import that fails in an integration fails as such, and a later import tries again."""
    (tmp_path / "somelib.py").write_text("value = 1\n")
    (tmp_path / "broken_integration.py").write_text("raise RuntimeError('broken')\n")
    run_python(
        """
import sys
sys.path.insert(0, sys.argv[1])
from samebits import integrations
from samebits.integrations import hooks
integrations.__path__.append(sys.argv[1])
hooks.INTEGRATIONS["somelib"] = ["broken_integration"]
for _ in range(2):
    try:
        import somelib
    except RuntimeError as error:
        assert str(error) == "broken"
    else:
        raise SystemExit("no error")
assert "somelib" not in sys.modules
""",
        str(tmp_path),
    )
