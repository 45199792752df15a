"""HTTP handlers: a request becomes a call of the store, and its result the response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from springtide_local.api import (
    bodies,
    discovery,
    errors,
    openapi_server,
    patching,
    policies,
    present,
    subresources,
    watch,
    writes,
)
from springtide_local.api.auth import Tokens, User, certificate_user
from springtide_local.api.collection import Stored, Subscription, encode
from springtide_local.api.impersonation import impersonated
from springtide_local.api.logs import LogProvider, log_options
from springtide_local.api.negotiation import AGGREGATED, negotiate
from springtide_local.api.objects import clone
from springtide_local.api.pages import page, selection
from springtide_local.api.policies import Attempt
from springtide_local.api.rbac import GROUP
from springtide_local.api.requests import (
    Audit,
    Target,
    attributes_of,
    deletion,
    flag,
    parse_target,
    verb_of,
    write_options,
)
from springtide_local.api.resources import ResourceType
from springtide_local.api.reviews import ACCESS, Reviews
from springtide_local.api.rights import Rights
from springtide_local.api.store import Store
from springtide_local.api.writes import Options
from springtide_local.ports import ApiError, Object

_LOG = logging.getLogger(__name__)
_OPEN = ("/healthz", "/livez", "/readyz", "/version")
_UNREAD_SECONDS = 2.0
_STREAMED = ("exec", "attach", "portforward", "proxy")


class Api:
    def __init__(self, store: Store, tokens: Tokens, audit: Audit) -> None:
        self.store = store
        self.log_provider: LogProvider | None = None
        self._tokens = tokens
        self._audit = audit
        self._rights = Rights(store)
        self._reviews = Reviews(self._rights, tokens)
        self._documents = openapi_server.Documents(store.registry)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Every request comes here; a refusal leaves as a Status object."""
        try:
            return await self._answer(request)
        except ApiError as problem:
            return _failed(problem)
        except web.HTTPRequestEntityTooLarge:
            return _failed(ApiError(413, "RequestEntityTooLarge", "the request is larger than 3 MiB"))
        except web.RequestPayloadError as problem:  # no gzip, though its headers say so, or cut short
            return _failed(errors.bad_request(f"the body of the request cannot be read: {problem}"))
        except (ConnectionError, web.HTTPException):
            raise
        except RecursionError:  # within the limit of bodies, but beyond that of some rule
            return _failed(errors.bad_request("the object provided is malformed: exceeded max depth"))
        except Exception as problem:
            _LOG.exception("%s %s failed", request.method, request.path)
            return _failed(errors.internal(f"{type(problem).__name__}: {problem}"))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        user = self._user(request)
        if user is None:
            if path not in _OPEN:
                raise errors.unauthorized()
            return self._document(request)
        user = impersonated(request.headers, user, self._rights)
        target = parse_target(self.store.registry, path) if path.startswith(("/api/", "/apis/")) else None
        asked = attributes_of(request.method, path, request.query, target)
        agent = request.headers.get("User-Agent", "")
        if target is not None:  # what was asked for counts, also where it is refused
            self._audit.count(user.name, asked.verb, target, agent)
        self._rights.demand(user, asked)
        if not asked.resource:
            return self._document(request)
        if target is None:
            return await self._other(request, user)
        if target.subresource in _STREAMED:
            raise errors.method_not_allowed(
                f"{target.subresource} is not served by the embedded cluster: its pods are processes of "
                "this machine"
            )
        if target.subresource and target.subresource not in target.resource.subresources:
            raise errors.no_such_path()
        verb = verb_of(request.method, target, flag(request.query, "watch"))
        match verb:
            case "get":
                return await self._get(request, target)
            case "list":
                return self._list(request, target)
            case "watch":
                return await self._watch(request, target)
            case "delete" | "deletecollection":
                return await self._delete(request, target, verb, user)
        options = write_options(request.query, agent, target.subresource)
        options.guard = partial(self._admit, user, options)
        if verb == "patch":
            if request.content_type == patching.APPLY and not self._exists(target):
                self._rights.demand(user, replace(asked, verb="create"))
            return await self._patch(request, target, options)
        return await self._write(request, target, options, verb)

    def _admit(
        self, user: User, options: Options, resource: ResourceType, obj: Object, old: Object | None
    ) -> None:
        """Refuse what somebody may not grant, and what a policy denies. Raise ApiError."""
        if resource.group == GROUP:
            self._rights.check_escalation(user, resource, obj, old)
        operation = "CREATE" if old is None else "UPDATE"
        if options.subresource == "scale" and old is not None:
            target = Target(resource)
            obj, old = subresources.scale_of(target, obj), subresources.scale_of(target, old)
        attempt = Attempt(user, operation, resource, options.subresource or "", obj, old, options.dry_run)
        policies.judge(self.store, attempt, options.warnings)

    def _exists(self, target: Target) -> bool:
        return self.store.peek(target.resource.storage, target.name, target.namespace) is not None

    def _user(self, request: web.Request) -> User | None:
        header = request.headers.get("Authorization", "")
        if header.startswith("Bearer "):
            user = self._tokens.check(header.removeprefix("Bearer ").strip())
            if user is None:
                raise errors.unauthorized()
            return user
        transport = request.transport
        return certificate_user(transport.get_extra_info("peercert")) if transport is not None else None

    # Documents: discovery, OpenAPI, health.

    def _document(self, request: web.Request) -> web.Response:
        path = request.path.rstrip("/")
        if request.method not in ("GET", "HEAD"):
            raise errors.method_not_allowed()
        if path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        if path == "/version":
            return _json(discovery.VERSION)
        if path == "/debug/springtide/requests":
            return _json({"requests": self._audit.report()})
        if path.startswith("/openapi"):
            return self._documents.answer(
                path, request.headers.get("Accept", ""), request.query.get("hash", "")
            )
        return self._discovery(path, request.headers.get("Accept", ""))

    def _discovery(self, path: str, accept: str) -> web.Response:
        registry = self.store.registry
        parts = path.strip("/").split("/")
        if path in ("/api", "/apis"):
            shape = negotiate(accept, (AGGREGATED[0],))
            if shape.kind:
                body = discovery.aggregated(registry, path == "/api", shape.version)
                kind = f"application/json;g={AGGREGATED[1]};v={shape.version};as={shape.kind}"
                return web.Response(body=encode(body), headers={"Content-Type": kind})
            return _json(discovery.api_versions() if path == "/api" else discovery.groups(registry))
        found: Object | None = None
        if parts[0] == "api" and len(parts) == 2:
            found = discovery.resources(registry, "", parts[1])
        elif parts[0] == "apis" and len(parts) == 2:
            found = discovery.group(registry, parts[1])
        elif parts[0] == "apis" and len(parts) == 3:
            found = discovery.resources(registry, parts[1], parts[2])
        elif path == "":
            paths = ["/api", "/api/v1", "/apis", "/healthz", "/livez", "/openapi/v3", "/readyz", "/version"]
            found = {"paths": paths}
        if found is None:
            raise errors.no_such_path()
        return _json(found)

    async def _other(self, request: web.Request, user: User) -> web.Response:
        """Paths below a group that name no stored resource: reviews."""
        parts = request.path.strip("/").split("/")[1:]
        namespace = ""
        if len(parts) == 5 and parts[2] == "namespaces" and parts[4].startswith("local"):
            namespace, parts = parts[3], [*parts[:2], parts[4]]
        kind = discovery.REVIEWS.get((parts[0], parts[1], parts[2])) if len(parts) == 3 else None
        if request.method != "POST" or kind is None or bool(namespace) != (kind == ACCESS[2]):
            raise errors.no_such_path()
        return _json(self._reviews.answer(kind, await _body(request), user, namespace), 201)

    # Reading.

    async def _get(self, request: web.Request, target: Target) -> web.StreamResponse:
        if target.subresource == "log":
            return await self._log(request, target)
        stored = self.store.get_stored(target.resource, target.name, target.namespace)
        if target.subresource == "scale":
            return _json(subresources.scale_of(target, stored.object))
        if target.subresource in ("eviction", "binding", "token", "finalize"):
            raise errors.method_not_allowed()
        shape = negotiate(request.headers.get("Accept", ""), present.SHAPES)
        return present.one(self.store, target, stored, shape, request.query)

    def _list(self, request: web.Request, target: Target) -> web.Response:
        shape = negotiate(request.headers.get("Accept", ""), present.SHAPES)
        return present.many(self.store, target, page(self.store, target, request.query), shape, request.query)

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        shape = negotiate(request.headers.get("Accept", "").replace(";stream=watch", ""), present.SHAPES)
        show = present.shower(self.store, target, shape, request.query)
        plan = watch.prepare(self.store, target, request.query)
        try:
            parts = watch.stream(self.store, target, plan, show)
            return await stream_parts(
                request, parts, "application/json", plan.subscription, plan.deadline - self.store.now()
            )
        finally:
            plan.subscription.cancel()

    async def _log(self, request: web.Request, target: Target) -> web.StreamResponse:
        pod = self.store.get_stored(target.resource, target.name, target.namespace).object
        options = log_options(pod, request.query, self.store.now())
        if self.log_provider is None:
            raise ApiError(501, "NotImplemented", "no kubelet runs in this cluster: there are no logs")
        return await stream_parts(
            request, self.log_provider(clone(pod), options), "text/plain; charset=utf-8"
        )

    # Writing.

    async def _write(self, request: web.Request, target: Target, options: Options, verb: str) -> web.Response:
        body = await _body(request)
        if target.subresource in ("eviction", "binding", "token", "scale"):
            return _json(self._sub(target, body, options, verb), 201 if verb == "create" else 200, options)
        if (verb == "create") == bool(target.name):
            raise errors.method_not_allowed()
        resource = target.resource
        if resource.view is not None:
            body = resource.view.store(body)
            resource = self.store.registry.stored(resource.storage)
        if verb == "create":
            stored = writes.create(self.store, resource, body, target.namespace, options)
        else:
            stored = writes.update(
                self.store, resource, target.name, target.namespace, body, options, demand_version=True
            )
        return self._written(request, target, stored, options, 201 if verb == "create" else 200)

    def _sub(self, target: Target, body: Object, options: Options, verb: str) -> Object:
        if target.subresource == "scale":
            if verb != "update":
                raise errors.method_not_allowed()
            return subresources.set_scale(self.store, target, body, options)
        if verb != "create":
            raise errors.method_not_allowed()
        if target.subresource == "eviction":
            return subresources.evict(self.store, target, body, options)
        if target.subresource == "binding":
            return subresources.bind(self.store, target, body, options)
        return subresources.request_token(self.store, self._tokens, target, body)

    async def _patch(self, request: web.Request, target: Target, options: Options) -> web.Response:
        options.in_patch = True
        kind = request.content_type
        body = await _payload(request)
        if target.subresource == "scale":
            return _json(patching.patch_scale(self.store, target, kind, body, options), 200, options)
        stored, created = patching.patch(
            self.store, target, kind, body, options, flag(request.query, "force")
        )
        return self._written(request, target, stored, options, 201 if created else 200)

    def _written(
        self, request: web.Request, target: Target, stored: Stored, options: Options, status: int
    ) -> web.Response:
        shape = negotiate(request.headers.get("Accept", ""), present.SHAPES)
        response = present.one(self.store, target, stored, shape, request.query)
        response.set_status(status)
        _warn(response, options)
        return response

    def _admit_deletion(
        self, user: User, resource: ResourceType, name: str, namespace: str | None, options: Options
    ) -> None:
        """Refuse a deletion that a policy denies. Raise ApiError."""
        old = self.store.peek(resource.storage, name, namespace)
        if old is not None:
            attempt = Attempt(user, "DELETE", resource, "", None, old, options.dry_run)
            policies.judge(self.store, attempt, options.warnings)

    async def _delete(self, request: web.Request, target: Target, verb: str, user: User) -> web.Response:
        if target.subresource:
            raise errors.method_not_allowed()
        body = await _body(request) if request.can_read_body else {}
        agent = request.headers.get("User-Agent", "")
        dry_run = bodies.of_type(body, "DeleteOptions", "dryRun", "[]string")
        query = {**request.query, **({"dryRun": dry_run[0]} if dry_run else {})}
        options = write_options(query, agent)
        wish = deletion(body, query)
        if verb == "delete":
            self._admit_deletion(user, target.resource, target.name, target.namespace, options)
            stored = writes.delete(self.store, target.resource, target.name, target.namespace, wish, options)
            gone = self.store.peek(target.resource.storage, target.name, target.namespace) is None
            if gone and not target.resource.deletion_returns_object:
                return _json(subresources.answer_status(target, stored))
            return self._written(request, target, stored, options, 200)
        chosen = selection(target, request.query)
        items = self.store.collection(target.resource.storage).items
        keys = [key for key in sorted(items) if target.namespace in (None, key[0]) and chosen.has(items[key])]
        for key in keys:
            self._admit_deletion(user, target.resource, key[1], key[0] or None, options)
            writes.delete(self.store, target.resource, key[1], key[0] or None, wish, options)
        return _json({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})


async def stream_parts(
    request: web.Request,
    parts: AsyncIterator[bytes | memoryview],
    kind: str,
    subscription: Subscription | None = None,
    seconds: float | None = None,
) -> web.StreamResponse:
    """Send parts as they come, until the client has enough. An error before the first part is still an
    ordinary refusal.

    Args:
        request: Whose answer it is.
        parts: The chunks to send.
        kind: The content type.
        subscription: Where the parts come from. Once it is overrun, the rest must be read at once.
        seconds: When the parts end by themselves; what is not read soon after that is dropped.
    """
    loop = asyncio.get_running_loop()
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache, private"})
    try:
        async with asyncio.timeout(None if seconds is None else seconds + _UNREAD_SECONDS) as limit:
            if subscription is not None:
                subscription.when_overrun(lambda: limit.reschedule(loop.time() + _UNREAD_SECONDS))
            if kind == "application/json":
                await response.prepare(request)
            async for part in parts:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(part)
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if not limit.expired():
            raise
        if request.transport is not None:  # it reads nothing: what is on its way to it is dropped, too
            request.transport.abort()
    except ConnectionError:  # whoever watched has gone: the ordinary end of a watch
        pass
    return response


async def _payload(request: web.Request) -> Any:
    """Return the decoded body, JSON or YAML. Raise ApiError 400, 415."""
    return bodies.decode(request.content_type, await request.read())


async def _body(request: web.Request) -> Object:
    body = await _payload(request)
    if not isinstance(body, dict):
        raise errors.bad_request("the object provided is unrecognized: it is no JSON object")
    return body


def _json(body: Object, status: int = 200, options: Options | None = None) -> web.Response:
    response = web.Response(body=encode(body), status=status, content_type="application/json")
    if options is not None:
        _warn(response, options)
    return response


def _warn(response: web.Response, options: Options) -> None:
    for text in options.warnings:
        response.headers.add("Warning", "299 - " + json.dumps(text))


def _failed(problem: ApiError) -> web.Response:
    response = _json(errors.status(problem), problem.code)
    # A refused eviction names no time, as in Kubernetes: else client-go waits, whatever --timeout.
    if seconds := problem.details.get("retryAfterSeconds"):
        response.headers["Retry-After"] = str(seconds)
    return response
