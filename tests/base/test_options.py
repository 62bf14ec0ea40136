# SPDX-License-Identifier: Apache-2.0
"""Options as fields declare them, and the values that text gives them."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.errors import UsageError
from llmb.base.options import RANKS, WORD, Option, build, convert, limit_problems, options_of


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: Annotated[float | None, Option(flags=("--lr",), above=0)] = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    model: Annotated[str, Option(flags=("-m", "--model"), form=WORD)]
    steps: Annotated[int, Option(minimum=1)] = 50
    kind: Annotated[Literal["a", "b"] | None, Option()] = None
    quick: Annotated[bool | None, Option(flags=("--quick/--slow",))] = None
    wide: Annotated[bool | None, Option(negates=True)] = None
    ranks: Annotated[str | None, Option(form=RANKS)] = None
    scales: Annotated[tuple[int, ...], Option(name="scale", minimum=1)] = ()
    extra: Annotated[tuple[str, ...], Option(repeatable=True)] = ()
    inner: Inner = Inner()
    other: int = 0


OPTIONS = options_of(Outer)


def test_a_declaration_has_the_fields_name_type_and_default() -> None:
    assert list(OPTIONS) == ["model", "steps", "kind", "quick", "no_wide", "ranks", "scale", "extra", "rate"]
    assert (OPTIONS["steps"].type, OPTIONS["steps"].default, OPTIONS["steps"].spelled) == (int, 50, "--steps")
    assert (OPTIONS["rate"].type, OPTIONS["rate"].keys) == (float, ("rate", "lr"))
    assert (OPTIONS["model"].spelled, OPTIONS["model"].keys) == ("--model", ("model",))
    assert (OPTIONS["quick"].spelled, OPTIONS["quick"].keys) == ("--quick", ("quick",))
    assert (OPTIONS["no_wide"].field, OPTIONS["no_wide"].keys) == ("wide", ("no_wide",))
    assert (OPTIONS["scale"].type, OPTIONS["scale"].listed, OPTIONS["scale"].keys) == (int, True, ("scale", "scales"))
    assert (OPTIONS["extra"].listed, OPTIONS["extra"].repeatable) == (False, True)


def test_options_make_a_record_and_those_in_it() -> None:
    assert build(Outer, {"model": "x", "rate": 0.1, "no_wide": True, "steps": None, "unheard": 1}) == Outer(
        model="x", wide=False, inner=Inner(rate=0.1)
    )


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("steps", ("007",), 7),
        ("rate", ("1e-4",), 1e-4),
        ("rate", (".5",), 0.5),
        ("quick", ("Yes",), True),
        ("quick", ("off",), False),
        ("kind", ("b",), "b"),
        ("model", ("llama3.1-8b",), "llama3.1-8b"),
        ("ranks", ("0,4-7",), "0,4-7"),
        ("scale", ("8", "16"), (8, 16)),
        ("extra", ("a=b", "a=b"), ("a=b", "a=b")),
    ],
)
def test_text_is_converted_to_the_fields_type(name: str, texts: tuple[str, ...], value: object) -> None:
    assert convert(OPTIONS[name], name, texts) == value


@pytest.mark.parametrize(
    ("name", "texts", "valid"),
    [
        *(
            ("steps", (text,), "a whole number of at least 1")
            for text in ("0", "1e3", "1.0", " 1", "1_0", "+1", "", "٣")
        ),
        *(("rate", (text,), "a number above 0") for text in ("0", "nan", "inf", "1_0", "0x1", "-1")),
        ("quick", ("maybe",), "true or false"),
        ("kind", ("A",), "a or b"),
        ("model", ("two words",), "a name"),
        ("ranks", ("7-4",), "ranks such as 0 or 0,4-7"),
        ("scale", ("8", "x"), "a whole number of at least 1"),
        ("extra", ("a\nb",), "text on one line"),
    ],
)
def test_bad_text_is_rejected_with_what_is_valid(name: str, texts: tuple[str, ...], valid: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert(OPTIONS[name], "its key", texts)
    assert caught.value.what == f"its key is '{texts[-1]}'; it must be {valid}"


def test_one_value_is_not_two() -> None:
    with pytest.raises(UsageError, match="steps accepts one value, not 2"):
        convert(OPTIONS["steps"], "steps", ("1", "2"))


def test_limits_of_a_record_are_checked_together() -> None:
    assert list(limit_problems(Outer(model="x", steps=0, scales=(8, 0)))) == [
        "--steps is 0; it must be at least 1",
        "--scale is 0; it must be at least 1",
    ]
    assert list(limit_problems(Inner(rate=-1.0))) == ["--lr is -1.0; it must be above 0"]
    assert list(limit_problems(Inner(rate=float("nan")))) == ["--lr is nan; it must be above 0"]
    assert list(limit_problems(Inner())) == []


@given(st.sampled_from(sorted(OPTIONS)), st.text())
def test_no_text_breaks_the_conversion(name: str, text: str) -> None:
    try:
        convert(OPTIONS[name], name, (text,))
    except UsageError as error:
        assert text in error.what
