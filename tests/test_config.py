"""Strict settings: every mistake in one line with the way out."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from hrmlm.config import StrictConfig, nearest
from hrmlm.errors import UserError


class Inner(StrictConfig):
    width: Annotated[int, Field(gt=0)] = 4


class Outer(StrictConfig):
    name: str
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner()

    @model_validator(mode="after")
    def _check(self) -> "Outer":
        if self.name == self.kind:
            raise ValueError(f"name {self.name!r} is the kind")
        return self


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "x", "kint": "a"}, "here.kint: unknown key, did you mean 'kind'?"),
        ({"name": "x", "zzz": 1}, "here.zzz: unknown key, valid: inner, kind, name"),
        ({"name": "x", "inner": {"widht": 1}}, "here.inner.widht: unknown key, did you mean 'width'?"),
        ({"name": "x", "inner": {"width": 0}}, "here.inner.width: input should be greater than 0 (got 0)"),
        ({"name": "x", "inner": 3}, "here.inner"),
        ({"name": "x", "kind": "c"}, "here.kind: input should be 'a' or 'b' (got 'c')"),
        ({}, "here.name: field required"),
        ({"name": "a"}, "here: name 'a' is the kind"),
    ],
)
def test_messages(given: dict, told: str) -> None:
    with pytest.raises(UserError) as error:
        Outer.parse(given, "here")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(UserError) as error:
        Outer.parse({"kind": "c", "inner": {"width": -1}}, "here")
    assert all(key in str(error.value) for key in ("here.name", "here.kind", "here.inner.width"))


@pytest.mark.parametrize("given", [None, 3, "text", ["a"]])
def test_no_mapping(given: object) -> None:
    with pytest.raises(UserError, match="expected a mapping"):
        Outer.parse(given, "here")  # type: ignore[arg-type]


def test_long_values_are_cut() -> None:
    with pytest.raises(UserError) as error:
        Outer.parse({"name": "x", "kind": "y" * 10_000}, "here")
    assert len(str(error.value)) < 200


def test_values_do_not_change_and_copies_are_checked() -> None:
    config = Outer(name="x")
    with pytest.raises(ValidationError):
        config.name = "y"  # type: ignore[misc]
    assert config.replace(name="y").name == "y"
    with pytest.raises(UserError, match="did you mean 'kind'"):
        config.replace(kid="b")


def test_nearest() -> None:
    assert nearest("stepz", ["steps", "seed"]) == "did you mean 'steps'?"
    assert nearest("q", ["steps", "seed"]) == "valid: seed, steps"
