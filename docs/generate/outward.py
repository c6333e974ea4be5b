"""Addresses that a built page would fetch from a network: scripts, styles, fonts, pictures, frames.

A link that a reader may follow is not fetched. Does NOT cover requests of a running script.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

FETCHED = {"audio", "embed", "iframe", "img", "input", "object", "script", "source", "track", "video"}
KINDS_OF_LINKS = {
    "icon",
    "preconnect",
    "dns-prefetch",
    "preload",
    "prefetch",
    "modulepreload",
    "stylesheet",
    "manifest",
}
OUTSIDE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


def fetched(html: str) -> list[str]:
    """Return the addresses outside the site that a browser would fetch to show a page."""
    reader = _Reader()
    reader.feed(html)
    return reader.addresses


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._is_style = tag == "style"
        given = [values.get(name, "") for name in ("src", "data", "poster")] if tag in FETCHED else []
        if tag == "link" and KINDS_OF_LINKS & set(values.get("rel", "").lower().split()):
            given.append(values.get("href", ""))
        given += IN_STYLES.findall(values.get("style", ""))
        self.addresses += [address for address in given if OUTSIDE.match(address)]

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.addresses += IN_STYLES.findall(data)
        self._is_style = False
