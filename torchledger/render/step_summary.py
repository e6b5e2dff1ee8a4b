"""The step summary of GitHub Actions: a page is added in what room the step's file has left."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torchledger.render.github import SUMMARY_LIMIT_BYTES, cut_page


def is_github(environ: Mapping[str, str]) -> bool:
    """Whether this runs as a step of GitHub Actions.

    >>> is_github({"GITHUB_ACTIONS": "true"}), is_github({})
    (True, False)
    """
    return environ.get("GITHUB_ACTIONS") == "true"


def append_summary(page: str, environ: Mapping[str, str]) -> str:
    """Appends the page to ``$GITHUB_STEP_SUMMARY``, cut to fit, and returns what kept it from that; mostly nothing.

    >>> append_summary("a page", {})
    ''
    """
    path = environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return ""
    try:
        taken = os.path.getsize(path) if os.path.exists(path) else 0
        content = cut_page(page, SUMMARY_LIMIT_BYTES - taken - 2)
        if not content:
            return "the step's summary is full: nothing was added to it"
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content + "\n\n")
    except (OSError, ValueError) as error:
        return f"cannot write the step's summary: {getattr(error, 'strerror', None) or error}"
    return ""
