"""The way in from outside: gates hop by hop, then one agent to talk to.

Order: the root gate (`admit`), open the root, the gate of hop 1, open hop 1, and so on.
Only the last step of an external path may be created; an absent step before it is 404
with nothing written. An unknown class anywhere ends it. The agent that is reached may
say that another root answers (`on_forward`): the walk goes on below that one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, final

from .bodies import stay_inside
from .calls import OutsideTarget, outside_target
from .core.limits import FORWARDS_MAX
from .core.path import ParsedPath, PathBelow, PathStep, check_name, parse_below
from .core.shown import without_query
from .errors import (
    CapacityError,
    CuletError,
    Deleted,
    FacetAborted,
    FacetBroken,
    NotFound,
    Refused,
    UsageError,
    UserError,
)
from .guests import REVOKED
from .http import ConnectContext, Forward, Request, Response, closed
from .node import Ambient, Node, ambient, is_stop
from .ports import Gate, Peer, TreeKey
from .sockets import Connection
from .supervise import ChildRef
from .tracing import NO_SPAN
from .tree import Tree

if TYPE_CHECKING:
    from .kernel import Kernel

Admit = Callable[[Request, PathStep], Awaitable[Request | Response | None]]


@final
class Visit:
    """One agent that an admitted request has reached. Use it within `with visit:`."""

    def __init__(self, tree: Tree, slot: str, request: Request, since: int) -> None:
        self._tree, self._slot, self._since = tree, slot, since
        self.request = request

    @property
    def gate(self) -> Gate:
        """The output gate that frames to this client wait at."""
        return self._tree.barrier

    def connect(self, peer: Peer, connection_id: str) -> Connection:
        """Register a socket; then `await connection.opened()`, and feed `received`.

        Raises `Refused` for somebody who was revoked meanwhile.
        """
        request = self.request
        self._tree.kernel.guests.check(request.identity, self._since)
        ctx = ConnectContext(request, request.identity, request.path)
        return self._tree.sockets.connect(self._slot, peer, connection_id, ctx)

    async def handle(self) -> Response:
        """Let the agent answer the request; the answer is durable when it is returned.

        Raises `Refused` for somebody who was revoked meanwhile, also in its middle.
        """
        tree, guests = self._tree, self._tree.kernel.guests
        guests.check(self.request.identity, self._since)
        guest = guests.enter(self.request.identity)
        try:
            with guest.within():
                response = await self._handle(tree)
        finally:
            guests.leave(guest)
        if guest.revoked:
            raise Refused(REVOKED, status=401)
        if not isinstance(response.body, bytes):
            body = _gated(tree, response.body, without_query(self.request.url))
            response.body = guests.guarded(guest.identity, body)
        return response

    async def _handle(self, tree: Tree) -> Response:
        with tree.visitor():
            node = await tree.wake(self._slot)
            ctx = Ambient(node, request=self.request, identity=self.request.identity)
            tracer = tree.kernel.tracer
            span = NO_SPAN if tracer is None else tracer.span(
                "request", f"{self.request.method} {node.kind.name}",
                {"agent": node.path_text()},
                parent=self.request.headers.get("traceparent"),
            )  # fmt: skip
            try:
                with span:
                    response = await node.enter(
                        ctx, node.agent.on_request, self.request
                    )
                    if not isinstance(response, Response):
                        what = type(response).__name__
                        raise TypeError(
                            f"on_request returned no Response, but a {what}"
                        )
                    stay_inside(node, ctx, response)
            except CuletError as error:
                response = error_response(error)
            except Exception as error:
                error_id = tree.kernel.report(
                    "request", node, error, name=without_query(self.request.url)
                )
                response = Response(f"the request failed (error {error_id})", 500)
            await _told(tree)
        return response


async def _told(tree: Tree) -> None:
    """Wait until what an answer may reveal is durable; what is deleted is."""
    if not tree.closed or tree.barrier.fenced is not None:
        await tree.durable()


async def _gated(
    tree: Tree, body: AsyncIterator[bytes], url: str
) -> AsyncIterator[bytes]:
    """Hold each part of a streamed body until what it may reveal is durable."""
    try:
        async for part in body:
            await tree.durable()
            yield part
    except (Deleted, FacetAborted):  # somebody has ended its agent: that is no failure
        raise
    except Exception as error:  # the client only sees it break off
        tree.kernel.report("request", None, error, name=url)
        raise
    finally:
        await closed(body)


def error_response(error: CuletError) -> Response:
    """Return the HTTP answer that names an error to a client."""
    match error:
        case Refused() | UserError():
            return Response(str(error), error.status)
        case NotFound():
            return Response("Not Found", 404)
        case Deleted():
            return Response("Gone", 410)
        case UsageError():
            return Response(str(error), 400)
        case CapacityError() | FacetAborted() | FacetBroken():
            return Response("Service Unavailable", 503, {"retry-after": "1"})
        case _:
            return Response("Service Unavailable", 503)


async def visit(
    kernel: Kernel,
    path: ParsedPath,
    request: Request,
    *,
    admit: Admit | None = None,
    props: Any = None,
    since: int | None = None,
) -> Visit | Response:
    """Walk an external path through its gates; a Response says where it ended.

    `props` are for the start of a root that is addressed itself; a facet gets none.
    `since`: `kernel.guests.number` when it began to be asked who comes; None: now.
    """
    since = kernel.guests.number if since is None else since
    try:
        return await _visit(kernel, path, request, admit, props, since)
    except CuletError as error:
        return error_response(error)


async def _visit(
    kernel: Kernel,
    path: ParsedPath,
    request: Request,
    admit: Admit | None,
    props: Any,
    since: int,
) -> Visit | Response:
    _check(kernel, path)
    if admit is not None:
        answer = await _gate(kernel, None, admit, request, path.root)
        if isinstance(answer, Response):
            return answer
        request = answer
    key = TreeKey(path.root.class_name, path.root.name)
    tree = await kernel.host.open_root(key, create=not path.hops)
    with tree.visitor():
        node = await tree.wake(tree.root_slot, props=props if not path.hops else None)
        return await _descend(tree, node, path.below, request, since)


async def visit_below(parent: Any, tail: str, request: Request) -> Visit | Response:
    """Walk `tail`, the raw path that is left below an agent, through the gates below it.

    `parent` is a stub that `get_agent` or `get_sub_agent` returned; it is woken, never
    made. Whether the visitor may come as far as the parent was for the caller to ask.
    """
    target = outside_target(parent)
    since = target.kernel.guests.number
    try:
        below = parse_below(tail, target.kernel.classes.known)
        return await _visit_below(target, below, request, since)
    except CuletError as error:
        return error_response(error)


async def _visit_below(
    target: OutsideTarget,
    below: PathBelow,
    request: Request,
    since: int,
    *,
    forwards: int = 0,
) -> Visit | Response:
    _check_hops(target.kernel, below)
    caller = ambient.get()
    if caller is not None:
        await caller.node.tree.durable()
    tree = await target.kernel.host.open_root(target.key, create=False)
    with tree.visitor():
        node = await tree.wake(target.slot)
        _check_depth(target.kernel, len(node.lineage()) + len(below.hops))
        if not below.hops:
            request = request.at(below.leaf_path)
        return await _descend(tree, node, below, request, since, forwards=forwards)


async def _descend(
    tree: Tree,
    node: Node,
    below: PathBelow,
    request: Request,
    since: int,
    *,
    forwards: int = 0,
) -> Visit | Response:
    """Go down from a node, a gate at each hop; only the last step may be made."""
    for number, hop in enumerate(below.hops, 1):
        request = request.at(below.tail(number - 1))
        child = ChildRef(hop.class_name, hop.name)
        there = tree.slot_of(node.slot, hop.class_name, hop.name) is not None
        answer = await _gate(
            tree.kernel, node, _within(node, node.agent.on_before_sub_agent, request),
            request, child,
        )  # fmt: skip
        if isinstance(answer, Response):
            await tree.durable()
            return answer
        request = answer
        # what was there when the gate was asked is not made again if it is deleted
        last = number == len(below.hops)
        node = await _step(tree, node, hop, create=last and not there)
    await tree.durable()
    if below.hops:
        request = request.at(below.leaf_path)
    request = request.replace(path=below.leaf_path)
    if node.kind.forwards:
        return await _forwarded(tree, node, request, since, forwards)
    return Visit(tree, node.slot, request, since)


async def pass_gates(
    tree: Tree, node: Node, below: PathBelow, request: Request
) -> None:
    """Ask every gate from a node down to one that is there; raises `Refused`.

    Nothing is made: `NotFound` where a step is not there (any more).
    """
    for number, hop in enumerate(below.hops, 1):
        request = request.at(below.tail(number - 1))
        gate = _within(node, node.agent.on_before_sub_agent, request)
        child = ChildRef(hop.class_name, hop.name)
        answer = await _gate(tree.kernel, node, gate, request, child)
        if isinstance(answer, Response):
            msg = "a gate has refused that"
            raise Refused(msg, status=answer.status)
        request = answer
        node = await _step(tree, node, hop, create=False)


async def _forwarded(
    tree: Tree, node: Node, request: Request, since: int, forwards: int
) -> Visit | Response:
    """Ask an agent who answers in its place, and go there."""
    hook = _within(node, node.agent.on_forward, request)
    answer = await _asked(tree.kernel, node, hook, request, (Forward, Response))
    if answer is None:
        return Visit(tree, node.slot, request, since)
    await tree.durable()
    if isinstance(answer, Response):
        return answer
    if forwards >= FORWARDS_MAX:
        msg = f"a request is forwarded at most {FORWARDS_MAX} times"
        raise UsageError(msg)
    target = outside_target(answer.to)
    below = parse_below(answer.path, tree.kernel.classes.known)
    return await _visit_below(target, below, request, since, forwards=forwards + 1)


def _within(node: Node, hook: Callable[..., Awaitable[Any]], request: Request) -> Any:
    """Return a hook of an agent as a call that enters it for this request."""
    ctx = Ambient(node, request=request, identity=request.identity)

    async def call(*args: Any) -> Any:
        try:
            return await node.enter(ctx, hook, *args)
        except CuletError:  # a refusal that is raised is an answer as well
            await _told(node.tree)
            raise

    return call


async def _gate(
    kernel: Kernel, node: Node | None, gate: Any, request: Request, child: Any
) -> Request | Response:
    """Ask one gate; a failing gate refuses with 500 and says nothing of why."""
    answer: Request | Response | None = await _asked(
        kernel, node, gate, request, (Request, Response), child
    )
    if isinstance(answer, Request):
        return answer.instead_of(request)
    return request if answer is None else answer


async def _asked(
    kernel: Kernel,
    node: Node | None,
    hook: Any,
    request: Request,
    kinds: tuple[type, ...],
    *args: Any,
) -> Any:
    """Ask a hook that decides over a request; what it must not answer refuses it."""
    place = without_query(request.url)
    try:
        answer = await hook(request, *args)
    except BaseException as error:
        if is_stop(error) or isinstance(error, CuletError):
            raise
        error_id = kernel.report("gate", node, error, name=place)
        return Response(f"refused (error {error_id})", 500)
    if answer is None or isinstance(answer, kinds):
        return answer
    error_id = kernel.report("gate", node, TypeError(repr(answer)), name=place)
    return Response(f"refused (error {error_id})", 500)


async def _step(tree: Tree, parent: Node, hop: PathStep, *, create: bool) -> Node:
    kind = tree.kernel.classes.of(hop.class_name)
    if create:
        return await tree.get(parent, kind, hop.name)
    slot = tree.child_slot(parent.slot, kind, hop.name)
    if slot is None:
        msg = f"no {hop.class_name} {hop.name!r}"
        raise NotFound(msg)
    tree.aborted.pop(slot, None)  # who was let in brings it back, as `get` does
    return await tree.wake(slot)


def _check(kernel: Kernel, path: ParsedPath) -> None:
    """Refuse what can never be, before anything runs or is written."""
    if path.root.class_name not in kernel.classes.roots:
        raise NotFound(path.root.class_name)
    check_name(path.root.name, root=True)
    _check_hops(kernel, path.below)
    _check_depth(kernel, len(path.hops) + 1)


def _check_depth(kernel: Kernel, depth: int) -> None:
    if depth > kernel.limits.depth:
        raise UsageError(f"a path has at most {kernel.limits.depth} steps")


def _check_hops(kernel: Kernel, below: PathBelow) -> None:
    for hop in below.hops:
        if hop.class_name not in kernel.classes.facets:
            raise NotFound(hop.class_name)
        check_name(hop.name)
