"""What axe-core finds wrong with a page for people who do not see it, or have no mouse.

`make checks` fetches axe-core into `.venv-checks`; nothing of it is in the tree. Its rules are those of WCAG 2.2, level
AA, and its own best practices.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

from tests.support.observe.browser import Page

AXE: Final = Path(__file__).parents[3] / ".venv-checks" / "axe.min.js"
_FOUND: Final = (
    "axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations.map("
    "one => `${one.id}: ${one.help}: ` + one.nodes.map(node => node.html.slice(0, 120)).join(' ; '))))"
)


async def violations(page: Page) -> list[str]:
    """One line a rule that the page breaks as it is now; none where axe-core could not be fetched."""
    if not AXE.exists():
        return []
    await page.value(f"{await asyncio.to_thread(AXE.read_text)}; 0")
    found: list[str] = json.loads(await page.value(_FOUND))
    return found
