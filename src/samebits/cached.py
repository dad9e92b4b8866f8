"""functools.cached_property without its lock, which Python has until 3.11.

That is one lock for all objects of a class: what is forked while another thread holds it waits for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801  # as the other one
        """What a method gives at its first call, kept as an attribute of the object; two threads may both call it."""

        def __init__(self, method: Callable[[Any], Any]) -> None:
            self._method = method
            self.__doc__ = method.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._method(instance)
            return value


__all__ = ["cached_property"]
