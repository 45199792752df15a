"""Garbage collection: dependents of a gone owner, and the contents of a terminating namespace.

`Collector` listens to the store and works off a queue in a task of its own, so that a cascade of any depth
never runs inside a request. A dependent goes when none of its owners exists any more, by uid: also one whose
owner was never there.

Tasks: one task in the API server's event loop; the store's listeners add to its queue and set `_wake`, and
never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator

from springtide_local.api import definitions, writes
from springtide_local.api.collection import Change, Key
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.objects import clone
from springtide_local.ports import ApiError, Object

_LOG = logging.getLogger(__name__)
_MANAGER = "kube-controller-manager"


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """One object that cannot be collected (its kind's schema has changed, say) must not stop the others."""
    try:
        yield
    except ApiError as problem:
        _LOG.warning("cannot collect %s: %s", what, problem.message)


def owner_uids(obj: Object) -> list[str]:
    return [owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()]


class Collector:
    """`patience` is how long (s) a deleted namespace keeps its contents, so that who deletes a whole
    manifest finds them.
    """

    def __init__(self, store: ObjectStore, patience: float = 0.7) -> None:
        self._store = store
        self._patience = patience
        self._dependents: dict[str, set[tuple[str, Key]]] = {}
        self._queue: deque[tuple[str, Key]] = deque()
        self._namespaces: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._definitions: set[str] = set()
        self._wake = asyncio.Event()
        store.listeners.append(self._changed)

    def _changed(self, storage: str, change: Change) -> None:
        here = (storage, change.key)
        before = owner_uids(change.old.object) if change.old is not None else []
        after = owner_uids(change.new.object) if change.type != "DELETED" else []
        for uid in before:
            if uid not in after:
                self._dependents.get(uid, set()).discard(here)
        for uid in after:
            self._dependents.setdefault(uid, set()).add(here)
            if not self._is_there(uid, change.key[0]):
                self._enqueue(here)
        if change.type == "DELETED":
            for dependent in self._dependents.pop(change.new.object["metadata"]["uid"], ()):
                self._enqueue(dependent)
            self._namespace_changed(change.key[0])
            self._definition_changed(storage)
        elif storage == definitions.STORAGE:
            self._definition_changed(change.key[1])
        elif storage == "namespaces" and change.new.object["metadata"].get("deletionTimestamp"):
            self._namespace_changed(change.key[1])

    def _namespace_changed(self, name: str) -> None:
        namespace = self._store.peek("namespaces", name) if name else None
        if namespace is not None and namespace["metadata"].get("deletionTimestamp"):
            self._namespaces.add(name)
            self._not_before.setdefault(name, self._store.now() + self._patience)
            self._wake.set()

    def _definition_changed(self, name: str) -> None:
        definition = self._store.peek(definitions.STORAGE, name)
        if definition is not None and definition["metadata"].get("deletionTimestamp"):
            self._definitions.add(name)
            self._wake.set()

    def _enqueue(self, item: tuple[str, Key]) -> None:
        self._queue.append(item)
        self._wake.set()

    async def run(self) -> None:
        """Collect garbage until cancelled."""
        while True:
            due = min((self._not_before[name] for name in self._namespaces), default=None)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it can swallow a cancellation.
                async with asyncio.timeout(None if due is None else max(due - self._store.now(), 0.0)):
                    await self._wake.wait()
            self._wake.clear()
            self.work()
            await asyncio.sleep(0)

    def work(self) -> None:
        """Do everything that is due now."""
        while self._queue:
            storage, key = self._queue.popleft()
            with _reported(f"{storage} {key[1]}"):
                self._collect(storage, key)
        while self._definitions:
            name = self._definitions.pop()
            with _reported(f"custom resources of {name}"):
                self._clean_up(name)
        now = self._store.now()
        for name in [name for name in self._namespaces if self._not_before[name] <= now]:
            self._namespaces.discard(name)
            with _reported(f"namespace {name}"):
                self._empty(name)

    def _collect(self, storage: str, key: Key) -> None:
        obj = self._store.peek(storage, key[1], key[0])
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            return
        owners = obj["metadata"].get("ownerReferences") or []
        alive = [owner for owner in owners if self._is_there(owner["uid"], key[0])]
        if not owners:
            return
        resource = self._store.registry.stored(storage)
        if not alive:
            self._delete(storage, key, obj["metadata"]["uid"])
        elif len(alive) < len(owners):
            changed = clone(obj)
            changed["metadata"]["ownerReferences"] = alive
            writes.update(self._store, resource, key[1], key[0] or None, changed, writes.Options(_MANAGER))

    def _is_there(self, uid: str, namespace: str) -> bool:
        """Owners are looked for in the dependent's namespace and cluster-wide."""
        found = self._store.by_uid.get(uid)
        return found is not None and found[1][0] in ("", namespace)

    def _delete(self, storage: str, key: Key, uid: str) -> None:
        resource = self._store.registry.stored(storage)
        request = writes.Deletion(uid=uid)
        try:
            writes.delete(self._store, resource, key[1], key[0] or None, request, writes.Options(_MANAGER))
        except ApiError as problem:
            if problem.code not in (404, 409):
                raise

    def _clean_up(self, name: str) -> None:
        """Delete the objects of a terminating definition; when none is left, let the definition go."""
        definition = self._store.peek(definitions.STORAGE, name)
        if definition is None:
            return
        items = self._store.collection(name).items
        for key, stored in list(items.items()):
            if not stored.object["metadata"].get("deletionTimestamp"):
                self._delete(name, key, stored.object["metadata"]["uid"])
        if items:
            return
        changed = clone(definition)
        finalizers = changed["metadata"].get("finalizers") or []
        if definitions.FINALIZER in finalizers:
            finalizers.remove(definitions.FINALIZER)
            resource = self._store.registry.stored(definitions.STORAGE)
            writes.update(self._store, resource, name, None, changed, writes.Options(_MANAGER))

    def _empty(self, namespace: str) -> None:
        """Delete what is in a terminating namespace; when nothing is left, the namespace itself."""
        obj = self._store.peek("namespaces", namespace)
        if obj is None or not obj["metadata"].get("deletionTimestamp"):
            return
        left = False
        for storage in self._store.registry.storages():
            if not self._store.registry.stored(storage).namespaced:
                continue
            for key, stored in list(self._store.collection(storage).items.items()):
                if key[0] == namespace:
                    if not stored.object["metadata"].get("deletionTimestamp"):
                        self._delete(storage, key, stored.object["metadata"]["uid"])
                    left = left or key in self._store.collection(storage).items
        if not left:
            self._not_before.pop(namespace, None)
            self._namespaces.discard(namespace)
            resource = self._store.registry.stored("namespaces")
            changed = clone(obj)
            changed["spec"]["finalizers"] = []
            options = writes.Options(_MANAGER, subresource="finalize")
            writes.update(self._store, resource, namespace, None, changed, options)
