"""Reading every text of a JSON-lines file on a web server once: Plimsoll's cached copy, compared with other ways.

    PYTHONPATH=src python benchmarks/data_remote.py [--mebibytes 256] [--rounds 3] [--data FILE] [--delay 0]

The server is aiohttp's file server (it supports ranges), on loopback in a separate process. Each arm reads all texts as
``str``, in order, in a new process after its imports. The time includes the copy and the index. "First" begins with an
empty cache, "again" with the cache of "first"; "here" reads the same local file with an empty cache.

Private memory is its largest increase, with forked processes, sampled every 20 ms. "Processor" is the processor time of
the reader and its children; it is more reliable than seconds if other programs are running. On loopback there is no
network latency: ``--delay`` makes the server wait that many milliseconds before each answer.

Needs aiohttp; "HF datasets" (streaming) needs datasets. Lines of plain text would be more typical, but datasets 5.2
with fsspec 2026.9 cannot stream them from a web server. It passes ``encoding`` to aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _private_memory import private_bytes

MIB = 2**20
LOOK_SECONDS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="MiB of generated text")
    parser.add_argument("--data", type=Path, help="JSON-lines file with a field `text`, to read instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=int, default=0, help="milliseconds before each answer")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.delay)
    elif options.way is not None:
        print(json.dumps(timed(WAYS[options.way](options.address, options.cache))))
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "served" / "texts.jsonl"
        file.parent.mkdir()
        if options.data is not None:
            file.symlink_to(options.data.resolve())
        else:
            draw_text(file, options.mebibytes * MIB)
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(file.parent), "--delay", str(options.delay)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            address = f"{server.stdout.readline().strip()}/{file.name}"
            rows = [
                {"round": number, "way": way}
                | asked(way, str(file) if way == "here" else address, folder / f"{number}")
                for number in range(options.rounds)
                for way in options.ways.split(",")
            ]
        finally:
            server.terminate()
            server.wait()
        report(rows, file.stat().st_size, options.delay)


def asked(way: str, address: str, folder: Path) -> dict[str, Any]:
    """Let a new process read the text once, and return its figures."""
    cache = folder / ("plimsoll" if way in {"first", "again"} else way)
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--way", way, "--address", address, "--cache", str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(rows: list[dict[str, Any]], num_bytes: int, delay: int) -> None:
    print(f"{num_bytes / MIB:.0f} MiB, {delay} ms before each answer\n")
    print(f"{'way':12} {'seconds':>8} {'MiB/s':>8} {'processor':>10} {'private':>12}")
    digests, results = set(), {}
    for way in dict.fromkeys(row["way"] for row in rows):
        good = [row for row in rows if row["way"] == way and "failed" not in row]
        if not good:
            print(f"{way:12} {next(row['failed'] for row in rows if row['way'] == way)}")
            continue
        digests |= {row["digest"] for row in good}
        seconds = statistics.median(row["seconds"] for row in good)
        private = max(row["private_bytes"] for row in good)
        used = statistics.median(row["processor_seconds"] for row in good)
        results[way] = {"seconds": seconds, "processor_seconds": used, "private_bytes": private}
        print(f"{way:12} {seconds:8.2f} {num_bytes / MIB / seconds:8.0f} {used:8.2f} s {private / MIB:8.1f} MiB")
    assert len(digests) == 1, "the ways have not read the same texts"
    print(json.dumps({"num_bytes": num_bytes, "delay_milliseconds": delay, "ways": results, "rows": rows}))


# -- the server and the text -------------------------------------------------------------------------------------------


def serve(folder: Path, delay: int) -> None:
    from aiohttp import web

    @web.middleware
    async def late(request: web.Request, handler: Any) -> Any:
        await asyncio.sleep(delay / 1000)
        return await handler(request)

    async def run() -> None:
        app = web.Application(middlewares=[late])
        app.router.add_static("/", folder, follow_symlinks=True)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"http://{host}:{port}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def draw_text(file: Path, num_bytes: int) -> None:
    """Write texts of Zipf-distributed words, with lognormal lengths."""
    random = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(50_000)])
    with file.open("w") as opened:
        while opened.tell() < num_bytes:
            counts = np.maximum(random.lognormal(2.7, 0.7, 10_000), 1).astype(int)
            drawn = words[np.minimum(random.zipf(1.3, counts.sum()) - 1, len(words) - 1)]
            lines = np.split(drawn, np.cumsum(counts)[:-1])
            opened.write("".join(f'{{"text": "{" ".join(line)}"}}\n' for line in lines))


# -- the ways ----------------------------------------------------------------------------------------------------------


def timed(read: Callable[[], Iterator[str]]) -> dict[str, Any]:
    """Read every text once, and hash their number and every hundredth text, which costs almost nothing."""
    before, most = private_bytes(), [0]
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            most[0] = max(most[0], private_bytes())

    digest, number = hashlib.sha256(), 0
    watcher = threading.Thread(target=look)
    watcher.start()
    used, begun = processor_seconds(), time.perf_counter()
    for number, text in enumerate(read(), 1):
        if number % 100 == 0:
            digest.update(text.encode())
    seconds = time.perf_counter() - begun
    is_over.set()
    watcher.join()
    digest.update(str(number).encode())
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds() - used,
        "private_bytes": max(most[0] - before, 0),
        "digest": digest.hexdigest(),
    }


def processor_seconds() -> float:
    """Return the processor seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def of_plimsoll(address: str, cache: Path) -> Callable[[], Iterator[str]]:
    import aiohttp  # noqa: F401
    import fsspec.implementations.http  # noqa: F401

    from plimsoll.data.formats import Reading
    from plimsoll.data.text.index import open_corpus

    return lambda: iter(open_corpus([address], Reading(), cache))


def of_fsspec(address: str, cache: Path) -> Callable[[], Iterator[str]]:
    import fsspec
    import fsspec.implementations.http

    def read() -> Iterator[str]:
        with fsspec.open(address, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                yield json.loads(line)["text"]

    return read


def of_urllib(address: str, cache: Path) -> Callable[[], Iterator[str]]:
    import urllib.request

    def read() -> Iterator[str]:
        with urllib.request.urlopen(address) as answer:
            for line in answer:
                yield json.loads(line)["text"]

    return read


def of_datasets(address: str, cache: Path) -> Callable[[], Iterator[str]]:
    import aiohttp  # noqa: F401
    import datasets

    def read() -> Iterator[str]:
        rows = datasets.load_dataset("json", data_files=address, split="train", streaming=True)
        return (row["text"] for row in rows)

    return read


WAYS: dict[str, Callable[[str, Path], Callable[[], Iterator[str]]]] = {
    "first": of_plimsoll,
    "again": of_plimsoll,
    "here": of_plimsoll,
    "fsspec": of_fsspec,
    "urllib": of_urllib,
    "HF datasets": of_datasets,
}

if __name__ == "__main__":
    main()
