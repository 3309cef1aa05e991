"""The way in from outside: gates hop by hop, then one agent to talk to.

Order: the root gate (`admit`), open the root, the gate of hop 1, open hop 1, and so on.
Only the last step of an external path may be created; an absent step before it is 404
with nothing written. An unknown class anywhere ends it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, final

from .core.limits import DEPTH_MAX
from .core.path import ParsedPath, PathStep, check_name
from .errors import (
    CapacityError,
    CuletError,
    Deleted,
    FacetAborted,
    FacetBroken,
    NotFound,
    Refused,
    UsageError,
)
from .http import ConnectContext, Request, Response
from .node import Ambient, Node, is_stop
from .ports import Gate, Peer, TreeKey
from .sockets import Connection
from .supervise import ChildRef
from .tree import Tree

if TYPE_CHECKING:
    from .kernel import Kernel

Admit = Callable[[Request, PathStep], Awaitable[Request | Response | None]]


@final
class Visit:
    """One agent that an admitted request has reached. Use it within `with visit:`."""

    def __init__(self, tree: Tree, slot: str, request: Request) -> None:
        self._tree, self._slot = tree, slot
        self.request = request

    @property
    def gate(self) -> Gate:
        """The output gate that frames to this client wait at."""
        return self._tree.barrier

    def connect(self, peer: Peer, connection_id: str) -> Connection:
        """Register a socket; then `await connection.opened()`, and feed `received`."""
        request = self.request
        ctx = ConnectContext(request, request.identity, request.path)
        return self._tree.sockets.connect(self._slot, peer, connection_id, ctx)

    async def handle(self) -> Response:
        """Let the agent answer the request; the answer is durable when it is returned."""
        tree = self._tree
        with tree.visitor():
            node = await tree.wake(self._slot)
            ctx = Ambient(node, request=self.request, identity=self.request.identity)
            try:
                response = await node.enter(ctx, node.agent.on_request, self.request)
            except (FacetAborted, Deleted, CuletError) as error:
                return error_response(error)
            except Exception as error:
                error_id = tree.kernel.report(
                    "request", node, error, name=self.request.url
                )
                return Response(f"the request failed (error {error_id})", 500)
            await tree.durable()
        if not isinstance(response.body, bytes):
            response.body = _gated(tree, response.body)
        return response


async def _gated(tree: Tree, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Hold each part of a streamed body until what it may reveal is durable."""
    async for part in body:
        await tree.durable()
        yield part


def error_response(error: CuletError) -> Response:
    """Return the HTTP answer that names an error to a client."""
    match error:
        case Refused():
            return Response(str(error), error.status)
        case NotFound() | Deleted():
            return Response("Not Found", 404)
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
) -> Visit | Response:
    """Walk an external path through its gates; a Response says where it ended."""
    try:
        return await _visit(kernel, path, request, admit, props)
    except CuletError as error:
        return error_response(error)


async def _visit(
    kernel: Kernel, path: ParsedPath, request: Request, admit: Admit | None, props: Any
) -> Visit | Response:
    _check(kernel, path)
    if admit is not None:
        answer = await _gate(kernel, None, admit, request, path.root)
        if isinstance(answer, Response):
            return answer
        request = answer
    key = TreeKey(path.root.class_name, path.root.name)
    tree = await kernel.open_root(key, create=not path.hops)
    with tree.visitor():
        node = await tree.wake(tree.root_slot, props=props if not path.hops else None)
        for number, hop in enumerate(path.hops, 1):
            request = request.at(path.tail(number - 1))
            child = ChildRef(hop.class_name, hop.name)
            ctx = Ambient(node, request=request, identity=request.identity)
            gate = node.agent.on_before_sub_agent

            async def ask(
                asked: Request, ref: ChildRef, *, at: Node = node, within: Ambient = ctx,
                hook: Any = gate,
            ) -> Any:  # fmt: skip
                return await at.enter(within, hook, asked, ref)

            answer = await _gate(kernel, node, ask, request, child)
            if isinstance(answer, Response):
                await tree.durable()
                return answer
            request = answer
            last = number == len(path.hops)
            node = await _step(
                tree, node, hop, create=last, props=props if last else None
            )
        await tree.durable()
        if path.hops:
            request = request.at(path.leaf_path)
        return Visit(tree, node.slot, request.replace(path=path.leaf_path))


async def _gate(
    kernel: Kernel, node: Node | None, gate: Any, request: Request, child: Any
) -> Request | Response:
    """Ask one gate; a failing gate refuses with 500 and says nothing of why."""
    try:
        answer = await gate(request, child)
    except BaseException as error:
        if is_stop(error) or isinstance(error, CuletError):
            raise
        error_id = kernel.report("gate", node, error, name=request.url)
        return Response(f"refused (error {error_id})", 500)
    if answer is None:
        return request
    if isinstance(answer, (Request, Response)):
        return answer
    error_id = kernel.report("gate", node, TypeError(repr(answer)), name=request.url)
    return Response(f"refused (error {error_id})", 500)


async def _step(
    tree: Tree, parent: Node, hop: PathStep, *, create: bool, props: Any
) -> Node:
    kind = tree.kernel.classes.of(hop.class_name)
    if create:
        return await tree.get(parent, kind, hop.name, props)
    slot = tree.child_slot(parent.slot, kind, hop.name)
    if slot is None:
        msg = f"no {hop.class_name} {hop.name!r}"
        raise NotFound(msg)
    return await tree.wake(slot)


def _check(kernel: Kernel, path: ParsedPath) -> None:
    """Refuse what can never be, before anything runs or is written."""
    if path.root.class_name not in kernel.classes.roots:
        raise NotFound(path.root.class_name)
    check_name(path.root.name, root=True)
    for hop in path.hops:
        if hop.class_name not in kernel.classes.facets:
            raise NotFound(hop.class_name)
        check_name(hop.name)
    if len(path.hops) + 1 > DEPTH_MAX:
        msg = f"a path has at most {DEPTH_MAX} steps"
        raise UsageError(msg)
