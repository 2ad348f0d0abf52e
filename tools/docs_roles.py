"""An extension of griffe (see mkdocs.yml) that turns Sphinx roles in docstrings into links of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|data|exc|func|meth|mod):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites roles such as ``:class:`` in every docstring that is shown; names that the site lacks stay plain."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        def link(match: re.Match[str]) -> str:
            name = match[1] if "." in match[1] else f"{obj.module.path}.{match[1]}"
            return f'<autoref identifier="{name}" optional>`{match[1]}`</autoref>'

        if obj.docstring:
            obj.docstring.value = _ROLE.sub(link, obj.docstring.value)
