"""Stubs, copying by value, and what of a class can be called.

Arguments and results cross between agents as MessagePack, decoded to the annotations
of the method, in both directions and always: two agents never share a mutable value.
Stubs and plain callables cross by reference.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final

import msgspec

from .bodies import stay_inside
from .errors import CapacityError, Deleted, NotFound, UsageError
from .firstcome import Line, Place
from .http import Request, Response, as_request
from .node import Ambient, Node, State, ambient, own, starting, starts_under

if TYPE_CHECKING:
    from .agent import Agent
    from .classes import AgentClass
    from .kernel import Kernel
    from .ports import TreeKey
    from .tree import Tree

A_co = TypeVar("A_co", covariant=True)
T = TypeVar("T")


@final
class Final(Generic[T]):
    """Yielded last by a streaming `@rpc` method: the value that ends the call."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


AsyncCallback = Callable[..., typing.Awaitable[Any]]

Across = Callable[[Any], Any]

UNENCODABLE: typing.Final = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding or decoding a value raises that cannot be copied: of a foreign type, no
Unicode, a number that is too large, nested too deeply or within itself."""


def json_bytes(value: Any, what: str, most: int | None = None) -> bytes:
    """Return a value as JSON; `what` names it in errors.

    Raises `UsageError` for one that is none, `CapacityError` beyond `most` bytes.
    """
    try:
        text = msgspec.json.encode(value)
    except UNENCODABLE as error:
        msg = f"{what} cannot be stored as JSON: {error}"
        raise UsageError(msg) from None
    if most is not None and len(text) > most:
        msg = f"{what} has {len(text)} bytes, the limit is {most}"
        raise CapacityError(msg)
    return text


def stored_json(text: str | None) -> Any:
    """Return what a column of JSON holds; None as well where it cannot be read.

    A row that somebody else has damaged must not hide or stop the others.
    """
    try:
        return None if text is None else msgspec.json.decode(text)
    except (msgspec.DecodeError, *UNENCODABLE):
        return None


# ---- copying


class _Copier:
    """Encode and decode with references kept aside for stubs and callables."""

    __slots__ = ("refs",)

    def __init__(self) -> None:
        self.refs: list[Any] = []

    def hook(self, obj: Any) -> Any:
        if isinstance(obj, Stub) or (callable(obj) and not isinstance(obj, type)):
            self.refs.append(obj)
            return msgspec.msgpack.Ext(1, len(self.refs).to_bytes(4, "big"))
        msg = f"a {type(obj).__name__} cannot be copied"
        raise TypeError(msg)

    def ext(self, code: int, data: memoryview) -> Any:
        return self.refs[int.from_bytes(data, "big") - 1]


def _as_is(_type: type, obj: Any) -> Any:
    return obj


_plain = msgspec.msgpack.Encoder().encode


def encode_value(value: Any) -> tuple[bytes, list[Any]]:
    """Return MessagePack bytes and the references among them; raises TypeError."""
    try:
        return _plain(value), []
    except TypeError:
        copier = _Copier()
        return msgspec.msgpack.encode(value, enc_hook=copier.hook), copier.refs


class Codec:
    """Copies values of one annotation."""

    __slots__ = ("_decode", "annotation")

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self._decode = msgspec.msgpack.Decoder(annotation, dec_hook=_as_is).decode

    def copy(self, value: Any, across: Across | None = None) -> Any:
        """Return an equal value that shares nothing; raises TypeError or ValidationError.

        `across` is asked what stands for each reference on the other side.
        """
        data, refs = encode_value(value)
        if not refs:
            return self._decode(data)
        copier = _Copier()
        copier.refs = refs if across is None else [across(ref) for ref in refs]
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            self.annotation, dec_hook=_as_is, ext_hook=copier.ext
        )
        return decoder.decode(data)


class Parameter(typing.NamedTuple):
    """One parameter of a method after `self`."""

    name: str
    annotation: Any
    required: bool


class Method:
    """One callable method of a class, its annotations resolved once."""

    def __init__(self, cls: type, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.name = fn.__name__
        self.where = f"{cls.__name__}.{fn.__name__}"
        try:
            hints = typing.get_type_hints(fn)
        except Exception as error:
            msg = f"{self.where}: its annotations cannot be resolved ({error})"
            raise UsageError(msg) from error
        self.signature = inspect.signature(fn)
        parameters = list(self.signature.parameters.values())[1:]
        for p in parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                msg = f"{self.where}: *{p.name} cannot be copied; name the parameters"
                raise UsageError(msg)
        self.parameters = [
            Parameter(p.name, hints.get(p.name, Any), p.default is p.empty)
            for p in parameters
        ]
        self.positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self.required = sum(p.required for p in self.parameters)
        self.streams = inspect.isasyncgenfunction(fn)
        self.by_name = {
            p.name: self._codec(p.name, p.annotation) for p in self.parameters
        }
        result = hints.get("return", Any)
        self.result = self._codec("return", Any if self.streams else result)
        self._args: dict[int, Codec] = {}

    def _codec(self, name: str, annotation: Any) -> Codec:
        try:
            return Codec(_crossing(annotation))
        except (TypeError, ValueError) as error:
            msg = (
                f"{self.where}: {name!r} is annotated {annotation!r}, which cannot be "
                f"copied ({error}); use plain data, a msgspec Struct or a dataclass"
            )
            raise UsageError(msg) from error

    def _arity(self, count: int) -> Codec:
        codec = self._args.get(count)
        if codec is None:
            kinds = tuple(_crossing(p.annotation) for p in self.parameters[:count])
            annotation: Any = tuple.__class_getitem__(kinds) if kinds else tuple[()]
            codec = self._args[count] = Codec(annotation)
        return codec

    def copy_args(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        across: Across | None = None,
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Copy arguments to the annotations; raises `UsageError` for what does not fit."""
        count = len(args)
        if count > self.positional or (not kwargs and count < self.required):
            self._refuse_count(args, kwargs)
        try:
            values = self._arity(count).copy(tuple(args), across)
            if not kwargs:
                return values, kwargs
            named = {k: self.by_name[k].copy(v, across) for k, v in kwargs.items()}
        except (*UNENCODABLE, KeyError) as error:
            msg = f"{self.where}: an argument cannot be copied: {error}"
            raise UsageError(msg) from None
        self._refuse_count(args, kwargs)
        return values, named

    def _refuse_count(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            self.signature.bind(None, *args, **kwargs)
        except TypeError as error:
            msg = f"{self.where}: {error}"
            raise UsageError(msg) from None

    def copy_result(self, value: Any, across: Across | None = None) -> Any:
        """Copy a result to the annotation; raises `UsageError` where it does not fit."""
        if value is None and self.result.annotation is Any:
            return value
        try:
            return self.result.copy(value, across)
        except UNENCODABLE as error:
            msg = f"{self.where}: its result cannot be copied: {error}"
            raise UsageError(msg) from None

    def from_json(self, args: Sequence[msgspec.Raw]) -> Sequence[Any]:
        """Decode JSON texts of arguments to the annotations; raises `UsageError`."""
        if not self.required <= len(args) <= self.positional:
            self._refuse_count(args, {})
        kinds = [_crossing(p.annotation) for p in self.parameters]
        try:
            return [
                msgspec.json.decode(text, type=kind)
                for text, kind in zip(args, kinds, strict=False)
            ]
        except UNENCODABLE as error:
            msg = f"{self.where}: {error}"
            raise UsageError(msg) from None


def _crossing(annotation: Any) -> Any:
    """Return what msgspec has to decode: references pass as they are."""
    origin = typing.get_origin(annotation)
    if origin is Stub or annotation is Stub or origin is Callable:
        return Any
    if inspect.isclass(origin) and issubclass(origin, Callable):  # type: ignore[arg-type]
        return Any
    if isinstance(annotation, TypeVar):
        return Any
    return annotation


# ---- stubs


class Target(Protocol):
    """Where the calls of a stub go."""

    def expect(self, name: str) -> None:
        """Raise `UsageError` for what cannot be called, as far as is known by now."""
        ...

    async def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Copy, enter, run, copy back: by the class that serves it when it is entered."""
        ...


class NotCallable(UsageError, AttributeError):
    """A stub has no such method; to whoever only looks it is a missing attribute."""


@final
class Stub(Generic[A_co]):
    """A handle on an agent: its public `async def` methods and nothing else.

    It names the slot. After eviction a call wakes the agent; after an abort calls raise
    `FacetAborted` until somebody calls `get`; after delete `Deleted`, for good; after an
    upgrade it has the methods of the new class.
    """

    __slots__ = ("_target",)

    def __init__(self, target: Target) -> None:
        object.__setattr__(self, "_target", target)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        target: Target = object.__getattribute__(self, "_target")
        if name == "fetch":
            return _fetch_of(target)
        try:
            target.expect(name)
        except UsageError as error:
            raise NotCallable(*error.args) from None

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await target.call(name, args, kwargs)

        call.__name__ = name
        return call

    def __setattr__(self, name: str, value: Any) -> None:
        msg = "a stub has no attributes to set; call a method of the agent"
        raise UsageError(msg)

    def __repr__(self) -> str:
        return f"<stub of {self._target!r}>"

    def __copy__(self) -> Stub[A_co]:
        return self

    def __deepcopy__(self, _memo: Any) -> Stub[A_co]:
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a stub lives in its process: pass the class and the name")


@final
class TreeTarget:
    """An agent of this tree, called from inside it: nothing waits for the disk."""

    __slots__ = ("_line", "fetches", "kind", "slot", "tree")

    def __init__(
        self, tree: Tree, slot: str, kind: AgentClass, *, fetches: bool = False
    ) -> None:
        self.tree, self.slot, self.kind = tree, slot, kind
        self._line = Line()
        self.fetches = fetches  # it is a child that calls its parent

    def __repr__(self) -> str:
        return f"{self.kind.name} {self.slot}"

    async def node(self) -> Node:
        """Return the live node, waking it if need be."""
        tree = self.tree
        node = tree.nodes.get(self.slot)
        if node is not None and (
            node.state is State.LIVE
            or (node.state is State.STARTING and starts_under(node))
        ):
            return node
        if self.slot in tree.aborted and tree.is_live_slot(self.slot):
            raise own(tree.aborted[self.slot])
        return await tree.wake(self.slot)  # which knows what is deleted

    async def _reached(self, place: Place | None = None) -> Node:
        """Return the live node, with room in its file, when it is this call's turn."""
        if place is None:
            node = self.tree.nodes.get(self.slot)
            awake = node is not None and node.state is State.LIVE
            if node is not None and awake and not self._line and _has_room(node):
                return node
            if starting.get() is not None:  # it must see for whom it waits
                return await self._with_room()
            place = self._line.place()
        try:
            node = await self._with_room()
            while not place.first:
                await place.wait()
                node = await self._with_room()
            return node
        finally:
            place.leave()

    async def _with_room(self) -> Node:
        node = await self.node()
        if not _has_room(node):  # its file needs to rest for a record
            await node.tree.barrier.room()
            node = await self.node()
        return node

    def expect(self, name: str) -> None:
        """Raise `UsageError` unless the class that serves the slot now has the method."""
        node = self.tree.nodes.get(self.slot)
        if node is not None:
            kind: AgentClass | None = node.kind
        else:
            kind = None if self.tree.closed else self.tree.kind_of(self.slot)
        (kind or self.kind).method(name)

    async def call(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        inward: Across | None = None,
        outward: Across | None = None,
        place: Place | None = None,
    ) -> Any:
        """Run one call in this task; `inward`, `outward` are asked about references."""
        caller = ambient.get()
        if caller is not None:
            caller.node.check()  # who was stopped calls nobody any more
        node = await self._reached(place)
        method = node.kind.method(name)
        if inward is None and caller is not None:
            inward = _callback_of(caller)
        values, named = method.copy_args(args, kwargs, inward)
        ours = caller is not None and caller.node.tree is node.tree
        ctx = Ambient(
            node, identity=caller.identity if caller else None,
            payer=caller.pays if caller is not None and ours else None,
        )  # fmt: skip
        if named:
            bound = method.fn

            async def run(agent: Agent) -> Any:
                return await bound(agent, *values, **named)

            result = await node.enter(ctx, run, node.agent)
        else:
            result = await node.enter(ctx, method.fn, node.agent, *values)
        return method.copy_result(result, outward)

    async def fetch(self, request: Request | str, **rest: Any) -> Response:
        """Let the agent answer a request, in this task; no gate is asked."""
        asked = as_request(request, **rest)
        if "websocket" in asked.headers.get("upgrade", "").lower():
            msg = (
                f"{self.kind.name}.fetch takes no WebSocket: connect to the agent's URL,"
                " or use route_sub_agent_socket of culet.web"
            )
            raise UsageError(msg)
        caller = ambient.get()
        if caller is not None:
            caller.node.check()
        node = await self._reached()
        if asked.identity is None and caller is not None:
            asked = asked.replace(identity=caller.identity)
        ctx = Ambient(node, request=asked, identity=asked.identity)
        answer = await node.enter(ctx, node.agent.on_request, asked)
        if not isinstance(answer, Response):
            msg = f"{node.kind.name}.on_request returned no Response, but "
            msg += f"a {type(answer).__name__}"
            raise UsageError(msg)
        return stay_inside(node, ctx, answer)


def _has_room(node: Node) -> bool:
    return node.tree.store.room(node.db)


def _fetch_of(target: Target) -> Callable[..., Any]:
    if isinstance(target, TreeTarget) and target.fetches:
        return target.fetch
    raise NotCallable(
        "fetch belongs to the stub that parent_agent returns; HTTP and WebSockets from"
        " outside go by the agent's URL, or by route_sub_agent_request of culet.web"
    )


@final
class OutsideTarget:
    """An agent called from outside its tree: what it answers is durable when told."""

    __slots__ = ("_line", "facet", "kernel", "key", "kind", "slot")

    def __init__(
        self,
        kernel: Kernel,
        key: TreeKey,
        slot: str,
        kind: AgentClass,
        *,
        facet: bool = False,
    ) -> None:
        self.kernel, self.key, self.slot, self.kind = kernel, key, slot, kind
        self.facet = facet  # whose class may change
        self._line = Line()

    def __repr__(self) -> str:
        return f"{self.kind.name} {self.slot} of {self.key.class_name}/{self.key.name}"

    def expect(self, name: str) -> None:
        """Raise `UsageError` as a stub in the tree does; of a facet that sleeps, later."""
        tree = self.kernel.trees.get(self.key)
        if tree is not None and not tree.closed:
            TreeTarget(tree, self.slot, self.kind).expect(name)
        elif not self.facet or self.kind.reserves(name):
            self.kind.method(name)

    async def tree(self) -> Tree:
        """Return its open tree, which is not made anew; raises `Deleted`."""
        try:
            return await self.kernel.host.open_root(self.key, create=False)
        except NotFound as error:
            msg = f"{self.key.class_name}/{self.key.name} is deleted"
            raise Deleted(msg) from error

    async def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call over the border of the tree: the caller's writes first, then the answer's."""
        place = None if starting.get() is not None else self._line.place()
        try:
            caller = ambient.get()
            if caller is not None:
                caller.node.check()
                await caller.node.tree.durable()
            tree = await self.tree()
            with tree.visitor():
                return await self._called(tree, name, args, kwargs, place)
        finally:
            if place is not None:
                place.leave()

    async def _called(
        self,
        tree: Tree,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        place: Place | None,
    ) -> Any:
        try:
            return await TreeTarget(tree, self.slot, self.kind).call(
                name, args, kwargs,
                inward=_inward(tree), outward=_outward, place=place,
            )  # fmt: skip
        finally:
            if not tree.closed or tree.barrier.fenced is not None:
                await tree.durable()


def outside_target(stub: Any) -> OutsideTarget:
    """Return where a stub points that `get_agent` or `get_sub_agent` has returned.

    Raises `UsageError` for anything else.
    """
    if isinstance(stub, Stub):
        target = object.__getattribute__(stub, "_target")
        if isinstance(target, OutsideTarget):
            return target
    msg = f"a stub that get_agent or get_sub_agent returned is wanted, not {stub!r}"
    raise UsageError(msg)


def _callback_of(owner: Ambient) -> Across:
    """Return what stands for a callable of an agent of the same tree: it runs in there."""

    def across(ref: Any) -> Any:
        if isinstance(ref, Stub):
            return ref

        async def back(*args: Any, **kwargs: Any) -> Any:
            return await owner.node.enter(owner, partial(ref, **kwargs), *args)

        return back

    return across


def _inward(tree: Tree) -> Across:
    """Return what stands in `tree` for a reference of a caller outside it."""
    from_agent = ambient.get() is not None

    def across(ref: Any) -> Any:
        if isinstance(ref, Stub):
            return _outward(ref)
        if from_agent:
            raise UsageError("a callback does not cross between roots: call a method")

        async def told(*args: Any, **kwargs: Any) -> Any:
            await tree.durable()  # it shows the outside what the agent has done
            return await ref(*args, **kwargs)

        return told

    return across


def _outward(ref: Any) -> Any:
    """Refuse a reference that would lead into a tree past its gate."""
    if isinstance(ref, Stub):
        target = object.__getattribute__(ref, "_target")
        if isinstance(target, OutsideTarget):
            return ref
        msg = f"{ref!r} does not leave its tree: outside, get it with get_sub_agent"
        raise UsageError(msg)
    raise UsageError("a callable does not leave its tree; return plain data")


async def iterate(stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield from an async generator and close it for certain, in this task."""
    try:
        async for item in stream:
            yield item
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
