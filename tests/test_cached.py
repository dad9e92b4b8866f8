"""A property that is computed once."""

from __future__ import annotations

from threading import Event, Thread

from samebits.cached import cached_property


class Number:
    def __init__(self, number: int, started: Event, goes_on: Event) -> None:
        self.number, self.started, self.goes_on = number, started, goes_on
        self.calls = 0

    @cached_property
    def double(self) -> int:
        """Twice as much."""
        self.calls += 1
        self.started.set()
        assert self.goes_on.wait(60)
        return 2 * self.number


def test_once_and_of_one_object_while_another_waits() -> None:
    started, never, always = Event(), Event(), Event()
    always.set()
    slow, quick = Number(1, started, never), Number(2, started, always)
    thread = Thread(target=lambda: slow.double)
    thread.start()
    assert started.wait(60)
    assert [quick.double, quick.double, quick.calls] == [4, 4, 1]
    never.set()
    thread.join()
    assert [slow.double, slow.calls] == [2, 1]
    assert Number.double.__doc__ == "Twice as much."
