"""The report's page: a template, filled with data."""

from __future__ import annotations

import json
import time
from importlib import resources

from specbench.report import gather
from specbench.storage.version import __version__


def page(found: gather.Found) -> str:
    """The page. Whatever texts the rows hold, they are data in it, never markup."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    texts = {"about": gather.about(found), "made": f"Drawn by specbench {__version__} on {day}"}
    content = json.dumps(gather.page_data(found) | texts, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        content = content.replace(sign, f"\\u{ord(sign):04x}")
    template = (resources.files("specbench.report") / "page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", content)
