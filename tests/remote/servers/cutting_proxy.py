"""A proxy of TCP connections that cuts answers short, before a server that cannot fail on demand."""

from __future__ import annotations

import contextlib
import socket
import threading


class CuttingProxy:
    """Forwards connections to a server on 127.0.0.1; threads of this process do it.

    Attributes:
        url: For example `http://127.0.0.1:40000`.
        num_cut: How many connections were cut.
    """

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_cut = 0
        self._cut_after: int | None = None
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, nbytes: int) -> None:
        """Close the next connection after so many bytes of its answers, and all that are open now."""
        self._cut_after = nbytes
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets = [client, server]
            limit, self._cut_after = self._cut_after, None
            threading.Thread(target=self._forward, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, limit), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        with source, contextlib.suppress(OSError):
            try:
                while limit != 0 and (piece := source.recv(65536)):
                    piece = piece[:limit]
                    target.sendall(piece)
                    if limit is not None:
                        limit -= len(piece)
                self.num_cut += limit == 0
            finally:
                target.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()
