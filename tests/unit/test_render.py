"""Entries as lines for people."""

from __future__ import annotations

import pytest

from chaz.cli.render import one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n\n b\tc ", "a b c"),
        ("sure?\x1b[2K\x1b[1Gfine", "sure?\ufffd[2K\ufffd[1Gfine"),
        ("rm \u202egnp.exe", "rm \ufffdgnp.exe"),
        ("\u00e4 \u4f60\u597d \U0001f468\u200d\U0001f469", "\u00e4 \u4f60\u597d \U0001f468\u200d\U0001f469"),
    ],
)
def test_what_anybody_wrote_is_one_line_that_moves_no_cursor(text: str, line: str) -> None:
    assert one_line(text) == line
