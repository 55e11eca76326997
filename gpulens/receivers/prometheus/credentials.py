"""The bearer token of a request, and the TLS of its connection.

Invariant: neither is read before the start, and neither shows in a message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from ssl import SSLContext

from gpulens.config.types import Secret
from gpulens.pipeline.client_tls import ClientTLSConfig, ssl_context
from gpulens.pipeline.errors import ScrapeError

_MAX_TOKEN = 64 * 1024


class BearerToken:
    """The Authorization header, from the configuration or from a file that is read again when it changes (the kubelet
    renews a pod's token every hour)."""

    def __init__(self, token: Secret | None, path: str) -> None:
        self._header = {} if token is None else _header(token.reveal())
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def headers(self) -> Mapping[str, str]:
        """The header as it is now, empty without a token. Raises ScrapeError when the file can't be read."""
        if self._path:
            try:
                self._read()
            except (OSError, ValueError) as error:
                self._seen = None
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise ScrapeError(f"bearer_token_file {self._path}: {why}", "token") from error
        return self._header

    def _read(self) -> None:
        with Path(self._path).open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._seen:
                return
            text = file.read(_MAX_TOKEN + 1)
        if len(text) > _MAX_TOKEN:
            raise ValueError(f"is larger than {_MAX_TOKEN // 1024} KiB")
        self._header, self._seen = _header(text.decode("ascii", "replace").strip()), stamp


def is_token(text: str) -> bool:
    """The text can stand in a header."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _header(token: str) -> dict[str, str]:
    if not is_token(token):
        raise ValueError("holds no token (one word of printable ASCII)")
    return {"Authorization": f"Bearer {token}"}


class LazyTls:
    """The TLS context of a block, made at the start; None where there is no block."""

    def __init__(self, config: ClientTLSConfig | None) -> None:
        self._config = config
        self._context: SSLContext | None = None

    def context(self) -> SSLContext | None:
        """The context. Raises StartError when a file can't be read."""
        if self._context is None and self._config is not None:
            self._context = ssl_context(self._config)
        return self._context
