"""Lists of kopf's, as far as an operator without kopf needs them in a test."""

from __future__ import annotations

from operator_cluster import FakeCluster

from springtide_operator import records
from springtide_operator.api import names
from springtide_operator.cluster import Listing
from springtide_operator.guarded_http import Feed
from springtide_operator.kube import Kube

PATHS = {names.PLURAL: f"/apis/{names.API_VERSION}/{names.PLURAL}"}


class FakeLists:
    """Hand over what a cluster in memory has."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.feed: Feed | None = None

    async def anew(self, plural: str) -> None:
        """List a kind. Raises ApiError as the cluster does."""
        assert self.feed is not None
        self.feed.begins(plural, "")
        _hand_over(self.feed, plural, await self._cluster.list_of(plural))


class ApiLists:
    """Hand over what an API server lists."""

    def __init__(self) -> None:
        self._kube = Kube()
        self.feed: Feed | None = None

    async def anew(self, plural: str) -> None:
        """List a kind. Raises ApiError as the server does."""
        path = PATHS.get(plural, f"/api/v1/{plural}")
        assert self.feed is not None
        self.feed.begins(plural, "")
        page = await self._kube.page(path, {}, records.reader_for(path))
        version = str(page.around["metadata"]["resourceVersion"])
        _hand_over(self.feed, plural, Listing(page.items, version))

    async def close(self) -> None:
        """Close all connections."""
        await self._kube.close()


def _hand_over(feed: Feed, plural: str, found: Listing) -> None:
    for item in found.items:
        feed.take_event(plural, None, item)
    uids = {str(item["metadata"].get("uid")) for item in found.items}
    feed.listed(plural, "", uids, found.resource_version)
