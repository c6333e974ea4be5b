"""A small web server on loopback, with the faults of real ones."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """Files by name, and faults by name: how many of the next answers with content fail, and how.

    Faults are ``"cut"`` (the connection ends half way) and a status number; a name that ends in ``!`` also applies to
    answers to HEAD. ``headers`` belong to each answer with a file, ``moved`` maps names to redirect targets.
    """

    files: dict[str, bytes]
    has_ranges: bool = True
    faults: dict[str, tuple[str, int]] = field(default_factory=dict)
    num_answers: Counter[str] = field(default_factory=Counter)
    address: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    says_state: bool = True
    moved: dict[str, str] = field(default_factory=dict)
    num_sent_bytes: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        if name in self.site.moved:
            self.send_response(302)
            self.send_header("Location", f"/{self.site.moved[name]}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = self.site.files.get(name)
        if content is None:
            self.send_error(404)
            return
        fault = self._fault(name, with_content)
        if fault.isdecimal():
            self.send_error(int(fault))
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.site.has_ranges else None
        begin, end = (int(span[1]), int(span[2] or len(content) - 1) + 1) if span else (0, len(content))
        part = content[begin:end]
        self.send_response(206 if span else 200)
        if self.site.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        if span:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        if self.site.says_state:
            self.send_header("ETag", f'"{hash(content)}"')
        for header, value in self.site.headers.items():
            self.send_header(header, value)
        self.end_headers()
        if not with_content:
            return
        self.site.num_answers[name] += 1
        sent = part[: len(part) // 2] if fault == "cut" else part
        self.site.num_sent_bytes += len(sent)
        self.wfile.write(sent)
        self.close_connection = fault == "cut"

    def _fault(self, name: str, with_content: bool) -> str:
        """Return the fault of this answer."""
        for key in (name, f"{name}!") if with_content else (f"{name}!",):
            fault, left = self.site.faults.get(key, ("", 0))
            if left:
                self.site.faults[key] = (fault, left - 1)
                return fault
        return ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve a site while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    site.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
