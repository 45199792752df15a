"""The exceptions of the library.

SpringtideError(RuntimeError)     something that the user or the platform must act on; the message says
what to do
    UsageError                    the script uses the library in a way that would break training
    MemoryLimitError              the model does not fit into a worker's memory at the size that the job may
shrink to
    ServerStepError               the parameter servers fail to make a step, again and again
    GenerationChanged             members came, went or failed: the script's own collectives are to be run
again, as springtide.retry() does
Dropped(BaseException)            internal: leaves the body of a dropped step; `with springtide.step()`
swallows it
PartDone(BaseException)           internal: leaves the body of a logical part that is not its worker's last;
swallowed too
"""

from __future__ import annotations


class SpringtideError(RuntimeError):
    """Training cannot go on; the message says what is wrong and what to do."""


class UsageError(SpringtideError):
    """The script broke a rule of the library; the message names the rule and the remedy."""


class MemoryLimitError(SpringtideError):
    """The job would end for want of memory at the smallest size that it may have; the message says what to
    change. The operator lets a job end with it: each worker would find the same."""


class ServerStepError(SpringtideError):
    """The optimizer's step fails on the parameter servers whenever it is tried; the message names where, and
    its error."""


class GenerationChanged(SpringtideError):
    """The group that the script's own collectives use is over: run them again (`springtide.retry`)."""


class Dropped(BaseException):
    """The body of a step that will not count is being left; the same samples are dealt again.

    A BaseException, so that a script's own `except Exception` does not keep a dropped body alive.
    """


class PartDone(BaseException):
    """Exact mode: the gradients of this logical part are in; the step goes on with the worker's next part."""
