"""torch modules with packed weights."""

import samebits.nn.packed_linear  # noqa: F401  # a kind of them, which is known from here on
