"""What of a call's arguments is shown."""

from __future__ import annotations

import json

import pytest

from chaz.runtime.masking import sensitive_values, shown_arguments


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"to": "ada", "card": "4111"}', '{"to": "ada", "card": "***"}'),
        ('{"card": {"number": "4111", "cvc": [1, 2]}}', '{"card": "***"}'),
        ('{"card": null}', '{"card": "***"}'),
        (r'{"c\u0061rd": "4111"}', '{"card": "***"}'),
        ('{"card": "4111", "card": "4222"}', '{"card": "***"}'),
        # Not where it belongs, but there.
        ('{"arguments": [{"card": "4111"}]}', '{"arguments": [{"card": "***"}]}'),
        # What a later value of the same name hides.
        ('{"to": {"card": "4111"}, "to": 1}', '{"to": 1}'),
        # Nothing to mask: as it came.
        ('{ "to":  1.50 }', '{ "to":  1.50 }'),
        ("", ""),
        # No JSON object: who knows what is where.
        ('{"card": "4111"', "***"),
        ('"{\\"card\\": \\"4111\\"}"', "***"),
        ('["4111"]', "***"),
        ("[" * 100_000, "***"),
        ('{"card": ' + "1" * 5000 + "}", "***"),
    ],
)
def test_sensitive_values_are_masked(arguments: str, shown: str) -> None:
    assert shown_arguments(arguments, ["card"]) == shown


@pytest.mark.parametrize("arguments", ['{"card": "4111"}', '{"card', "[1]"])
def test_without_a_sensitive_parameter_all_is_shown(arguments: str) -> None:
    assert shown_arguments(arguments, []) == arguments
    assert sensitive_values(arguments, []) == set()


def test_the_texts_inside_of_sensitive_values() -> None:
    arguments = json.dumps(
        {
            "card": {
                "number": "4111222",
                "deep": [{"code": 12345, "rate": 10.25, "yes": True, "none": None}],
                "pin": "123",
            },
            "to": "somebody",
            "inner": {"card": "nested"},
        }
    )
    assert sensitive_values(arguments, {"card"}) == {"4111222", "12345", "10.25", "nested"}


@pytest.mark.parametrize("arguments", ["", '{"card": "4111222"', "[1234567]"])
def test_what_is_no_object_has_no_values(arguments: str) -> None:
    assert sensitive_values(arguments, {"card"}) == set()
