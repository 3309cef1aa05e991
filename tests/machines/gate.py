"""Nothing leaves a tree before the count of commits that it was stamped with is durable,
and what leaves a client's outbox is a prefix of what was pushed, in order.

One barrier's gate, moved by hand, and the real sessions with their outboxes in front of
it, against lists: commits, records, failed records, pages of replay, slow transports,
closes. No kernel and no clock, so a history costs a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from culet.kernel.core.limits import Limits
from culet.kernel.ports import Blob
from culet.web.outbox import Close
from culet.web.session import Session
from machines.sometimes import Sometimes

LIMITS = Limits(outbox_bytes=120)
which = st.sampled_from([0, 0, 0, 1, 2])  # one has a long life, so that things meet
one_in_four = st.sampled_from([False, False, False, True])  # else it is always over


class Tree:
    """The gate of a tree whose commits and records are rules."""

    def __init__(self) -> None:
        self.commits = self.durable = 0
        self.fenced = False
        self.held: list[Callable[[int], None]] = []

    def hold(self, waiter: Callable[[int], None]) -> None:
        if self.fenced:
            waiter(-1)
        else:
            self.held.append(waiter)

    def tell(self, durable: int) -> None:
        held, self.held = self.held, []
        for waiter in held:
            waiter(durable)


class Client:
    """One session and the model of what it was given and what it let go."""

    def __init__(self, tree: Tree) -> None:
        self.session = Session(tree, LIMITS, self.ready, self.cut)
        self.session.connection = self
        self.pushed: list[tuple[int, Blob]] = []
        self.left: list[Blob] = []
        self.end: tuple[int, Close] | None = None
        self.pages: list[Blob] = []
        self.replayed = 0  # of `left`
        self.was_ready = False
        self.was_cut = False
        self.ends = 0

    def ready(self) -> None:
        self.was_ready = True

    def cut(self, why: str) -> None:
        self.was_cut = True

    # the kernel's side

    @property
    def behind(self) -> bool:
        return bool(self.pages)

    def pull(self) -> Blob | None:
        page = self.pages.pop(0)
        self.pushed.append((0, page))
        return page

    def received(self, message: str | bytes) -> None:
        raise AssertionError("nothing is received here")

    def closed(self, code: int, reason: str, *, was_clean: bool) -> None:
        self.ends += 1


class GateMachine(RuleBasedStateMachine):
    """See the module's text."""

    sometimes: ClassVar = Sometimes(
        "waited", "left later", "behind a held one", "cut", "fenced", "closed late",
        "replayed", "landed", "came again",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.clients = [Client(self.tree) for _ in range(3)]
        self.number = 0

    def client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    @rule()
    def commit(self) -> None:
        self.tree.commits += 1

    @rule(
        which=which,
        size=st.sampled_from([0, 1, 9, 40, 60]),
        old=st.sampled_from([0, 0, 1, 9]),
    )
    def push(self, which: int, size: int, old: int) -> None:
        """Something leaves for a client: stamped now, or a while ago."""
        client, tree = self.client(which), self.tree
        self.number += 1
        blob = Blob(f"{self.number:04}" + "x" * size)
        stamp = max(tree.commits - old, 0)
        room = client.session._outbox.fits(blob.size)
        open_ = not client.was_cut and client.end is None and not client.session.over
        client.session.push(blob, stamp)
        if client.was_cut:
            self.sometimes.hit("cut")
        elif tree.fenced and stamp > tree.durable:
            assert not client.session._outbox.held, "it would wait for ever"
        elif open_ and room:
            client.pushed.append((stamp, blob))
            self.sometimes.hit("waited", stamp > tree.durable)
            behind = stamp <= tree.durable and client.session._outbox.held
            self.sometimes.hit("behind a held one", behind)

    @rule(share=st.sampled_from([1.0, 1.0, 0.5, 0.3, 0.0]))
    @precondition(lambda self: not self.tree.fenced)
    def record(self, share: float) -> None:
        """Some of the commits become durable."""
        tree = self.tree
        tree.durable += round((tree.commits - tree.durable) * share)
        tree.tell(tree.durable)

    @rule(really=one_in_four)
    @precondition(lambda self: not self.tree.fenced)
    def fail(self, really: bool) -> None:
        """A record fails: what is held never leaves. The next life begins there."""
        if not really:
            return
        tree = self.tree
        tree.fenced = True
        held = [list(c.session._outbox._held) for c in self.clients]
        tree.tell(-1)
        for client, lost in zip(self.clients, held, strict=True):
            void = {id(what) for _stamp, what in lost}
            client.pushed = [(s, b) for s, b in client.pushed if id(b) not in void]
            if client.end is not None:  # a close is true without its tree
                client.end = (0, client.end[1])
        self.sometimes.hit("fenced")

    @rule()
    @precondition(lambda self: self.tree.fenced)
    def restart(self) -> None:
        """The tree lives again, with new connections."""
        self.tree = Tree()
        for client in self.clients:
            client.session.lost(1012, "", was_clean=False)
            assert client.ends == 1
        self.clients = [Client(self.tree) for _ in range(3)]

    @rule(which=which)
    def take(self, which: int) -> None:
        """The transport writes."""
        client = self.client(which)
        before, pages = len(client.left), len(client.pages)
        new = client.session.take()
        client.left += new
        late = any(stamp > 0 for stamp, _ in client.pushed[before : before + len(new)])
        self.sometimes.hit("left later", late)
        self.sometimes.hit("replayed", pages > len(client.pages))

    @rule(which=which)
    def land(self, which: int) -> None:
        """The bytes are out of our hands."""
        client = self.client(which)
        client.session.landed()
        self.sometimes.hit("landed", bool(client.left))
        if (
            not client.was_cut
        ):  # what it held goes with it, whatever becomes of the tree
            rest = sum(b.size for _, b in client.pushed[len(client.left) :])
            assert client.session._outbox.size == rest

    @rule(which=which, pages=st.integers(1, 4))
    def fall_behind(self, which: int, pages: int) -> None:
        """There is something to replay."""
        client = self.client(which)
        if client.end is None and not client.was_cut:
            client.pages += [Blob("p" * 20) for _ in range(pages)]
            client.session.wake()
            assert client.was_ready

    @rule(which=which)
    def come_again(self, which: int) -> None:
        """A client that was cut or closed connects anew."""
        client = self.client(which)
        if client.was_cut or client.session.closing is not None:
            client.session.lost(1006, "", was_clean=False)
            self.clients[which % len(self.clients)] = Client(self.tree)
            self.sometimes.hit("came again")

    @rule(which=which, really=one_in_four)
    def close(self, which: int, really: bool) -> None:
        """The agent closes a client; what comes after is nothing."""
        if not really:
            return
        client, tree = self.client(which), self.tree
        if client.end is None and not client.session.over:
            client.pages.clear()
            stamp = 0 if tree.fenced else tree.commits
            client.end = (stamp, Close(1000, "bye"))
        client.session.close(1000, "bye", tree.commits)

    @invariant()
    def nothing_is_early_and_order_is_kept(self) -> None:
        for client in self.clients:
            gone = client.pushed[: len(client.left)]
            assert client.left == [blob for _, blob in gone]
            assert all(stamp <= self.tree.durable for stamp, _ in gone)
            closing = client.session.closing
            if closing is not None:
                assert client.end is not None
                assert closing == client.end[1]
                assert client.end[0] <= self.tree.durable
                durable = [stamp <= self.tree.durable for stamp, _ in client.pushed]
                assert all(durable), "closed before what was said last"
                self.sometimes.hit("closed late", client.end[0] > 0)

    def teardown(self) -> None:
        """All becomes durable: all leaves."""
        tree = self.tree
        if not tree.fenced:
            tree.durable = tree.commits
            tree.tell(tree.durable)
        for client in self.clients:
            if client.was_cut:
                continue
            for _ in range(len(client.pages) + 2):
                client.left += client.session.take()
                client.session.landed()
            self.nothing_is_early_and_order_is_kept()
            assert len(client.left) == len(client.pushed)
            assert not client.pages
            assert (client.session.closing is None) == (client.end is None)
