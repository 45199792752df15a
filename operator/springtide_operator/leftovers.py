"""Pods of jobs that are no more, until they are gone: Kubernetes gives them more grace than they need."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from springtide_operator.cache import Cache, Key
from springtide_operator.cluster import Cluster, is_gone
from springtide_operator.kube import ApiError
from springtide_operator.perform import shorten_grace
from springtide_operator.plan import grace
from springtide_operator.plan.actions import ShortenGrace

log = logging.getLogger("springtide.operator")

SETTLE_SECONDS = 0.005  # events of one cause come in bunches
RETRY_SECONDS = 1.0
PARALLEL = 32  # requests at a time
REMEMBERED = 4096  # jobs that are known to be gone


class Leftovers:
    """Shortens the grace of deleted pods whose job does not exist.

    `look(key)` after anything of that name has changed; `run()` is a task. That the cache knows no such job
    proves nothing: it may be older than the pods. So the API server is asked, once for each job.
    """

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        may_act: Callable[[], bool],
        on_action: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._cluster, self._cache = cluster, cache
        self._may_act, self._on_action = may_act, on_action
        self._wanted: set[Key] = set()
        self._wake = asyncio.Event()
        self._gone: OrderedDict[str, None] = OrderedDict()  # uids of jobs

    def look(self, key: Key) -> None:
        """See to the pods of that job name soon, if a job that is no more has left any."""
        if self._cache.left_behind(key):
            self._wanted.add(key)
            self._wake.set()

    async def run(self) -> None:
        """Work for ever; what fails is tried again."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._wake.clear()
            if not self._may_act():
                self._wanted.clear()  # whoever acts next looks at everything
                continue
            keys, self._wanted = sorted(self._wanted), set()
            again = [key for key in keys if not await self._see_to(key)]
            if again:
                await asyncio.sleep(RETRY_SECONDS)
                for key in again:
                    self.look(key)

    async def _see_to(self, key: Key) -> bool:
        """Whether all is done that is to be done for now."""
        try:
            return await self._shorten(key)
        except ApiError as error:
            log.warning("pods of a deleted job: %s; tried again", error, extra=_fields(key))
        except Exception:  # one name's pods must not keep the others' waiting
            log.exception("pods of a deleted job: tried again", extra=_fields(key))
        return False

    async def _shorten(self, key: Key) -> bool:
        """As `_see_to`. Raise ApiError."""
        actions: list[ShortenGrace] = []
        for uid, pods in self._cache.left_behind(key).items():
            wanted = grace.of_gone_job(pods)
            if wanted and await self._is_gone(key, uid):
                actions += wanted
        done = True
        for start in range(0, len(actions), PARALLEL):
            if not self._may_act():
                return True
            batch = actions[start : start + PARALLEL]
            done = all(await asyncio.gather(*(self._one(key, action) for action in batch))) and done
        return done

    async def _is_gone(self, key: Key, uid: str) -> bool:
        """Whether the API server knows no job of this uid. Raise ApiError."""
        if uid in self._gone:
            return True
        try:
            found = await self._cluster.get_job(*key)
        except ApiError as error:
            if not is_gone(error):
                raise
        else:
            if found["metadata"]["uid"] == uid:
                self._cache.put_job(found)
                return False
        self._gone[uid] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        return True

    async def _one(self, key: Key, action: ShortenGrace) -> bool:
        try:
            await shorten_grace(self._cluster, self._cache, key, action)
        except ApiError as error:
            if is_gone(error) or error.code == 409:
                return True
            log.warning("the grace of %s is not shortened: %s", action.name, error, extra=_fields(key))
            return False
        self._on_action(action.kind)
        text = "waits for %s no longer than %d s: %s"
        log.info(text, action.name, action.seconds, action.reason, extra=_fields(key))
        return True


def _fields(key: Key) -> dict[str, object]:
    return {"fields": {"job": "/".join(key)}}
