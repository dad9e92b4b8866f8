"""Programs that torch.export or AOTInductor saved: they name operators, which are there from their definition on."""

from __future__ import annotations

import samebits.df11.operator
import samebits.plans.dispatch
import samebits.plans.experts  # noqa: F401
