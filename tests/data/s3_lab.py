"""An S3 emulator in this process (moto), with faults of HTTP put into it and a proxy for those of TCP."""

from __future__ import annotations

import io
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest

BUCKET = "lab"
KEY_ID, SECRET = "CANARYKEYID", "canary-secret-value"
Answer = Callable[[dict[str, Any]], tuple[int, str] | None]


@dataclass
class Faults:
    """What the emulator does wrong; `requests` is what it saw, as `METHOD /path`."""

    before: Answer = lambda environ: None
    """Status and code to answer with instead of doing what is asked."""
    after: Answer = lambda environ: None
    """The same, when it has been done: its own answer is lost."""
    ignore_conditions: bool = False
    requests: list[str] = field(default_factory=list)


@dataclass
class Lab:
    port: int
    faults: Faults

    def environ(self, port: int | None = None) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}", "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    @property
    def root(self) -> str:
        return f"s3://{BUCKET}"

    @cached_property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1",
            aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET,
        )

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def empty(self) -> None:
        """Delete every object, without a request."""
        _backend().buckets[BUCKET].keys.clear()

    def names(self) -> list[str]:
        """Every key, without a request."""
        return sorted(_backend().buckets[BUCKET].keys)

    def put(self, key: str, body: bytes = b"") -> None:
        """Make an object, without a request."""
        _backend().put_object(BUCKET, key, body)

    def held(self, key: str) -> bytes:
        """An object, without a request."""
        data: bytes = _backend().buckets[BUCKET].keys[key].value
        return data

    def body(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data


def _backend() -> Any:
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


@contextmanager
def running_lab() -> Iterator[Lab]:
    """The emulator with one empty bucket. Skips the test where it is not installed."""
    for name in ("boto3", "moto", "flask", "flask_cors"):
        pytest.importorskip(name, reason=f"the S3 emulator needs {name}: pip install -e '.[test]' in a clone")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    faults = Faults()
    one_at_a_time = threading.Lock()  # moto looks for an object before it writes it: two writers could be told that they won
    inner = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        faults.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        if faults.ignore_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
            environ.pop("HTTP_IF_MATCH", None)
        wrong = faults.before(environ)
        if wrong is None:
            started: list[Any] = []
            if length := environ.get("CONTENT_LENGTH"):  # read before: a client that hangs stops no other
                environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
            with one_at_a_time:
                done = list(inner(environ, lambda *values: started.extend(values)))
            wrong = faults.after(environ)
            if wrong is None:
                start(*started)
                return done
        code, name = wrong
        body = f"<Error><Code>{name}</Code><Message>injected</Message></Error>".encode()
        start(f"{code} {name}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    lab = Lab(server.server_port, faults)
    try:
        lab.client.create_bucket(Bucket=BUCKET)
        lab.empty()  # objects outlive an emulator of this process
        yield lab
    finally:
        server.shutdown()


@dataclass
class Proxy:
    """Between client and emulator; the next `faulty` connections go wrong as `kind` says."""

    upstream: int
    kind: str = ""
    """latency; reset, truncation: after `good_bytes` of the answer; black hole: nothing is ever answered."""
    faulty: float = 0
    good_bytes: int = 600
    port: int = 0

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._handle, args=(listener.accept()[0],), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        kind = self.kind if self.faulty > 0 else ""
        self.faulty -= 1
        with suppress(OSError), closing(client), socket.create_connection(("127.0.0.1", self.upstream)) as server:
            sent = 0
            while True:
                ready, _, _ = select.select([client, server], [], [])
                if client in ready:
                    data = client.recv(65536)
                    if not data:
                        return
                    if kind != "black hole":
                        server.sendall(data)
                    continue
                data = server.recv(4096)
                if not data:
                    return
                if kind == "latency":
                    time.sleep(0.05)
                left = self.good_bytes - sent
                if kind in ("reset", "truncation") and left < len(data):
                    client.sendall(data[:left])
                    if kind == "reset":
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                client.sendall(data)
                sent += len(data)


@contextmanager
def running_proxy(upstream: int) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.port = listener.getsockname()[1]
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        yield proxy
