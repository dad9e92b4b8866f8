"""``python -m samebits`` is ``samebits``."""

from __future__ import annotations

from samebits.cli import main

if __name__ == "__main__":  # which worker processes, that import this, too, are not
    main()
