"""Messages of a group are waited for by threads, which keep nothing of them."""

from __future__ import annotations

import weakref
from datetime import timedelta

from springtide.comm.work import Waiter


class Work:
    """A message that has arrived."""

    def wait(self, timeout: timedelta) -> bool:
        return True


def test_thread_keeps_no_work_that_it_has_waited_for() -> None:
    """A work that such a thread drops at the interpreter's end would end the process by a signal."""
    waiter = Waiter(timedelta(seconds=60), lambda: False)
    work = Work()
    known = weakref.ref(work)
    assert waiter.wait(work)
    del work
    assert known() is None
    waiter.close()
