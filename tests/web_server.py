"""A small web server on loopback, with what goes wrong on real ones."""

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
    """Files by their names, and faults by name: how many of the next answers with content go wrong, and how."""

    files: dict[str, bytes]
    has_ranges: bool = True
    faults: dict[str, tuple[str, int]] = field(default_factory=dict)
    num_answers: Counter[str] = field(default_factory=Counter)
    address: str = ""


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
        content = self.site.files.get(name)
        if content is None:
            self.send_error(404)
            return
        fault, left = self.site.faults.get(name, ("", 0)) if with_content else ("", 0)
        if left:
            self.site.faults[name] = (fault, left - 1)
        if left and fault == "500":
            self.send_error(500)
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
        self.send_header("ETag", f'"{hash(content)}"')
        self.end_headers()
        if not with_content:
            return
        self.site.num_answers[name] += 1
        if left and fault == "cut":
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self.wfile.write(part)


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
