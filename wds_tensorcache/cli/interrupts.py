"""Ctrl-C in a command: one KeyboardInterrupt, at a place where it ends the command."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from math import inf
from typing import Any

__all__ = ["delayed_interrupts", "handle_interrupts"]

_IGNORED_S = 0.5
_AGAIN_AFTER_S = 0.02  # most finalizers end earlier


class _Handler:
    """The handler of SIGINT, while a command runs.

    If Ctrl-C is held down, an interrupt would arrive at any line, also while the command ends because of another one. So
    signals within half a second after an interrupt are ignored.
    """

    def __init__(self) -> None:
        self._interrupted_s = -inf
        self._is_delayed = self._is_received = False

    def __call__(self, *_: object) -> None:
        now = time.monotonic()
        if self._is_delayed:
            self._is_received = True
        elif now - self._interrupted_s >= _IGNORED_S:
            self._interrupted_s = now
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def delayed(self) -> Iterator[None]:
        self._is_delayed = True
        try:
            yield
        finally:
            self._is_delayed = False
            if self._is_received:
                self._is_received = False
                self()

    def see_unraisable(self, unraisable: Any) -> None:
        """Interrupt again after an interrupt in a finalizer, which Python drops: a `sys.unraisablehook`."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            _thread.start_new_thread(self._again, ())  # an interrupt from this thread could end this call
        else:
            sys.__unraisablehook__(unraisable)

    def _again(self) -> None:
        time.sleep(_AGAIN_AFTER_S)
        self._interrupted_s = -inf
        if hasattr(signal, "pthread_kill"):  # not on Windows; it also ends a wait of the main thread
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main()


_HANDLER = _Handler()


def handle_interrupts() -> None:
    """Raise one KeyboardInterrupt for a Ctrl-C, and for all that follow within half a second.

    Nothing changes outside of the main thread, and in a process that ignores or handles SIGINT.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _HANDLER)
        sys.unraisablehook = _HANDLER.see_unraisable


def delayed_interrupts() -> contextlib.AbstractContextManager[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the `with` block, not inside it. It needs `handle_interrupts`.

    Hazard: inside the import of torch, a KeyboardInterrupt can abort the process. Blocking the signal in this thread does not
    help: the kernel gives it to a thread that numpy started, and Python raises the exception in the main thread all the same.
    """
    return _HANDLER.delayed()
