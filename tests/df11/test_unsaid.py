"""What files say besides their tensors."""

from __future__ import annotations

import json

import pytest

from samebits.df11.config import Df11Config
from samebits.df11.unsaid import KEY, Unsaid
from samebits.errors import FormatError


@pytest.mark.parametrize(
    "unsaid",
    [
        Unsaid({"a.weight": (3, 4)}, Df11Config({"a": []}), {"b": "all exponents are equal"}),
        Unsaid({"a.weight": (3, 4)}),
        Unsaid(raw={"b": "all exponents are equal"}),
        Unsaid(),
    ],
)
def test_there_and_back(unsaid: Unsaid) -> None:
    assert Unsaid.parse({"other": "x", **unsaid.to_metadata()}) == unsaid


def test_nothing_to_say() -> None:
    assert Unsaid().to_metadata() == {}
    assert Unsaid.parse({"format": "pt"}) == Unsaid()


@pytest.mark.parametrize(
    "said",
    [
        [],
        {"shapes": []},
        {"shapes": {"a": 3}},
        {"shapes": {"a": [3, -1]}},
        {"shapes": {"a": [True, 2]}},
        {"shapes": {"a": [2.0]}},
        {"raw": ["a"]},
        {"raw": {"a": 1}},
        {"config": {}},
    ],
)
def test_what_is_malformed(said: object) -> None:
    with pytest.raises(FormatError):
        Unsaid.parse({KEY: json.dumps(said)})
    with pytest.raises(FormatError):
        Unsaid.parse({KEY: json.dumps(said)[:-1]})
