"""Parts of a pipeline that cannot be packed, such as a text encoder in FP16, do not keep the others from being so.

diffusers' own models stay as they are, weight by weight, where values are not BF16's. transformers' are refused as a
whole, because they would be rounded or compute in another dtype: alone that is an error, in a pipeline a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from diffusers.pipelines import pipeline_utils

from samebits.errors import DtypeError

_log = logging.getLogger(__name__)


def register() -> None:
    """Wrap the function that loads a part."""
    pipeline_utils.load_sub_model = _loading(pipeline_utils.load_sub_model)


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_sub_model(
        *args: Any, name: str, model_variants: dict[str, str], quantization_config: Any = None, **kwargs: Any
    ) -> Any:
        variants = dict(model_variants)  # of which the part's is taken away when it is loaded
        try:
            return original(
                *args, name=name, model_variants=model_variants, quantization_config=quantization_config, **kwargs
            )
        except DtypeError as error:
            if quantization_config is None:
                raise
            _log.warning("%s of the pipeline is not compressed: %s", name, error)
        quantization_config.config_mapping.pop(name, None)
        return original(*args, name=name, model_variants=variants, **kwargs)

    return load_sub_model


register()
