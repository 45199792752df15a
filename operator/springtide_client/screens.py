"""Shows a job's progress where the caller is: a terminal, a notebook, or plain lines elsewhere.

Threads: a `Relay` is written by the thread of the event loop and read by the caller's, which alone prints.
Notebooks show what is printed by the thread that runs the cell below that cell, and rich's live display wants
one thread.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from springtide_cli.screen import Screen, make_screen, panel, stamped
from springtide_cli.story import Line

if TYPE_CHECKING:
    from springtide_cli.jobview import JobView
    from springtide_kube.loop_thread import LoopThread

Result = TypeVar("Result")
_END = object()


class Relay(Screen):
    """A screen whose lines and views wait in a queue."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def say(self, line: Line) -> None:
        """Queue a line."""
        self._items.put(line)

    def show(self, job: JobView | None) -> None:
        """Queue the job's present state."""
        self._items.put(job)

    def end(self) -> None:
        """Let `play` return once all is shown."""
        self._items.put(_END)

    def play(self, screen: Screen) -> None:
        """Show what is queued, until the end."""
        while (item := self._items.get()) is not _END:
            if isinstance(item, Line):
                screen.say(item)
            else:
                screen.show(item)


def relayed(thread: LoopThread, work: Coroutine[Any, Any, Result], relay: Relay, screen: Screen) -> Result:
    """Return what a coroutine returns, while this thread shows what it says.

    Args:
        thread: runs the coroutine, which is cancelled with its caller.
        work: writes to the relay.
        relay: between the two.
        screen: shows.
    """
    future = thread.start(work)
    future.add_done_callback(lambda _: relay.end())
    try:
        with screen:
            relay.play(screen)
        return future.result()
    finally:
        future.cancel()


class NotebookScreen(Screen):
    """Lines below a cell, and above them the job's present state, which is written anew."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._handle: Any = None

    def say(self, line: Line) -> None:
        """Print a line."""
        for row in stamped(line, time.time()):
            print(row)

    def show(self, job: JobView | None) -> None:
        """Write the view anew."""
        from IPython.display import display

        view = panel(job, time.monotonic() - self._began)
        if self._handle is None:
            self._handle = display(view, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(view)


class Silent(Screen):
    """Shows nothing."""

    def say(self, line: Line) -> None:
        """Drop a line."""

    def show(self, job: JobView | None) -> None:
        """Drop a view."""


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def screen_for(show: bool) -> Screen:
    """Return the screen of the place where this runs; a silent one if nothing is to be shown."""
    if not show:
        return Silent()
    if in_notebook():
        return NotebookScreen()
    from rich.console import Console

    return make_screen(Console())
