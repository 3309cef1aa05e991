"""The classes that a kernel knows, each looked at once when the kernel opens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from .calls import Method
from .core.budget import checked
from .core.path import check_classes, kebab
from .errors import UsageError
from .pump import VERBS, brings_verbs

if TYPE_CHECKING:
    from .agent import Agent


# hooks that the JavaScript clients' server has under two names
_FORMER: Final = {"on_state_update": "on_state_changed"}


class RpcMark:
    """What `@rpc` leaves on a function."""

    __slots__ = ("description", "name")

    def __init__(self, name: str, description: str | None) -> None:
        self.name, self.description = name, description


class CallableMethod(NamedTuple):
    """What a class says of a method that clients may call."""

    description: str | None
    streaming: bool


def rpc(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> Any:
    """Mark a method as callable by clients over the socket.

    Arguments arrive as JSON and are decoded to the annotations. An async generator
    streams: each yield is a chunk, a last `Final(value)` the result. Never inherited by
    an override that is not marked itself.
    """

    def mark(target: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.iscoroutinefunction(target) and not inspect.isasyncgenfunction(
            target
        ):
            msg = f"@rpc needs an async method, {target!r} is not: make it async"
            raise UsageError(msg)
        target.__culet_rpc__ = RpcMark(name or target.__name__, description)  # type: ignore[attr-defined]
        return target

    return mark if fn is None else mark(fn)


@final
class AgentClass:
    """One agent class with its contract: methods for stubs, methods for clients."""

    def __init__(self, cls: type[Agent], base: type[Agent]) -> None:
        self.cls = cls
        self.name = cls.__name__
        self.kebab = kebab(cls.__name__)
        self.methods: dict[str, Method] = {}
        self.rpc: dict[str, Method] = {}
        self.callables: dict[str, CallableMethod] = {}
        self._reserved = frozenset(dir(base))
        _refuse_overrides(cls, base)
        _refuse_unawaited(cls, base)
        for name, fn in inspect.getmembers(cls, inspect.isfunction):
            if name in VERBS:
                continue  # for the kernel alone: see `pump`
            mark = getattr(fn, "__culet_rpc__", None)
            asynchronous = inspect.iscoroutinefunction(fn)
            if mark is None and (name.startswith("_") or name in self._reserved):
                continue
            if asynchronous and not name.startswith("_"):
                self.methods[name] = method = Method(cls, fn)
            elif mark is not None:
                method = Method(cls, fn)
            else:
                continue
            if mark is not None:
                self._let_clients_call(mark, method)
        self.runs_itself = brings_verbs(cls)
        if self.runs_itself and cls.on_turn is not base.on_turn:
            msg = f"{cls.__name__} has on_turn and the verbs of ChildAdapter: keep one"
            raise UsageError(msg)
        self.is_tool = self.runs_itself or cls.on_turn is not base.on_turn
        self.resumable = self.runs_itself or cls.resumable  # it can be followed again
        _check_settings(cls)
        self.start_takes_props = len(inspect.signature(cls.on_start).parameters) > 1
        # A turn that cannot be resumed has not begun while the author's start runs: what
        # dies in there may be tried again.
        starts = cls.on_start is not base.on_start or cls.__init__ is not base.__init__
        self.start_may_be_repeated = starts and not self.resumable
        self.hears_start = cls.on_agent_tool_start is not base.on_agent_tool_start
        self.hears_finish = cls.on_agent_tool_finish is not base.on_agent_tool_finish
        self.takes_notice = hasattr(cls, "_notify_finish")  # it has a chat
        self.hears_progress = cls.on_progress is not base.on_progress
        self.hears_state = cls.on_state_changed is not base.on_state_changed
        self.forwards = cls.on_forward is not base.on_forward
        self.hears_close = cls.on_close is not base.on_close

    def __repr__(self) -> str:
        return f"<class {self.name}>"

    def _let_clients_call(self, mark: RpcMark, method: Method) -> None:
        other = self.rpc.setdefault(mark.name, method)
        if other is not method:
            names = f"{other.fn.__name__} and {method.fn.__name__}"
            msg = f"{self.name}: clients would call both {names} {mark.name!r}"
            raise UsageError(msg)
        self.callables[mark.name] = CallableMethod(mark.description, method.streams)

    def reserves(self, name: str) -> bool:
        """Whether no class can have a method of that name for others to call."""
        return name.startswith("_") or name in self._reserved or name in VERBS

    def method(self, name: str) -> Method:
        """Return what a stub may call; raises `UsageError` with the remedy."""
        method = self.methods.get(name)
        if method is not None:
            return method
        where = f"{self.name}.{name}"
        if self.reserves(name):
            msg = f"{where} is not callable through a stub: it belongs to the agent itself"
        elif callable(getattr(self.cls, name, None)):
            msg = f"{where} is not callable through a stub: make it async"
        else:
            msg = f"{where} does not exist"
        raise UsageError(msg)


def _refuse_overrides(cls: type, base: type) -> None:
    """Refuse a subclass that defines one of the kernel's own names, or a former one."""
    own: frozenset[str] = base.__culet_final__  # type: ignore[attr-defined]
    for former, name in _FORMER.items():
        if hasattr(cls, former):
            msg = f"{cls.__name__}.{former} would never be called: it is {name} now"
            raise UsageError(msg)
    for klass in cls.__mro__:
        if klass is base:
            break
        if getattr(klass, "__culet_base__", False) and "__culet_base__" in vars(klass):
            continue  # a chat base of ours
        for name in vars(klass):
            if name in own:
                msg = (
                    f"{klass.__name__}.{name} hides a member of Agent; "
                    f"give the method another name"
                )
                raise UsageError(msg)


def _refuse_unawaited(cls: type, base: type) -> None:
    """Refuse a hook that is asked and not awaited, if it is async: it would say yes."""
    for name, hook in inspect.getmembers(base, inspect.isfunction):
        mine = getattr(cls, name)
        if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
            continue
        if inspect.iscoroutinefunction(mine) or inspect.isasyncgenfunction(mine):
            msg = f"{cls.__name__}.{name} is not awaited: make it a plain `def`"
            raise UsageError(msg)


def _check_settings(cls: type[Agent]) -> None:
    """Refuse what a class sets to something that it cannot be."""
    if not inspect.isasyncgenfunction(cls.on_turn):
        msg = f"{cls.__name__}.on_turn must be `async def` with `yield`"
        raise UsageError(msg)
    if cls.supervision not in ("contain", "escalate"):
        msg = (
            f"{cls.__name__}.supervision is contain or escalate, "
            f"not {cls.supervision!r}"
        )
        raise UsageError(msg)
    if cls.durability not in (None, "power", "process"):
        msg = f"{cls.__name__}.durability is power or process, not {cls.durability!r}"
        raise UsageError(msg)
    checked(cls.turn_budget)


def _by_name(classes: Iterable[type[Agent]], where: str) -> dict[str, type[Agent]]:
    found: dict[str, type[Agent]] = {}
    try:
        given = list(classes)
    except TypeError:
        msg = f"{where} is a list of classes, not {classes!r}"
        raise UsageError(msg) from None
    for cls in given:
        name = getattr(cls, "__name__", repr(cls))
        if found.setdefault(name, cls) is not cls:
            msg = f"two different classes in {where} are named {name}; rename one"
            raise UsageError(msg)
    return found


@final
class Classes:
    """All classes of one kernel, by name and by kebab name."""

    def __init__(
        self,
        roots: Iterable[type[Agent]],
        facets: Iterable[type[Agent]],
        base: type[Agent],
    ) -> None:
        self.roots = _by_name(roots, "roots")
        self.facets = _by_name(facets, "facets")
        both = {**self.roots, **self.facets}
        for name, cls in both.items():
            if not (inspect.isclass(cls) and issubclass(cls, base)):
                msg = f"{name} is not an Agent class"
                raise UsageError(msg)
            if self.roots.get(name, cls) is not self.facets.get(name, cls):
                msg = f"two different classes are named {name}"
                raise UsageError(msg)
        if not self.roots:
            msg = "open_kernel needs at least one root class"
            raise UsageError(msg)
        check_classes(both)
        self.known = {name: AgentClass(cls, base) for name, cls in both.items()}

    def of(self, cls: type[Agent] | str, *, among: str = "facets") -> AgentClass:
        """Return the class by itself or by name; raises `UsageError` when not registered."""
        if not isinstance(cls, str) and not inspect.isclass(cls):
            msg = f"{cls!r} is no agent class: pass the class itself"
            raise UsageError(msg)
        name = cls if isinstance(cls, str) else cls.__name__
        group = self.roots if among == "roots" else self.facets
        kind = self.known.get(name) if name in group else None
        if kind is None or (not isinstance(cls, str) and kind.cls is not cls):
            msg = (
                f"class {name!r} is not registered: add it to open_kernel({among}=[…])"
            )
            raise UsageError(msg)
        return kind
