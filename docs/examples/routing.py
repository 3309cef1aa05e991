"""A chat is a root of its own; each person has a hub for theirs, and pads below it.

    hypercorn --worker-class trio --workers 0 routing:app      # any ASGI server
    culet serve routing:app                                    # or ours

`/agents/chats/{user}` is a person's hub, `/agents/chats/{user}/chats/{id}` one of their
chats. `/pads/{user}/sub/pad/{name}` are the house's own URLs for a facet of the hub.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, ClassVar

from quart import abort, request, websocket
from quart_trio import QuartTrio

from culet.adapters import RoutedAgents
from culet.kernel import Agent, PathStep, Request, Response, open_kernel, rpc
from culet.web import (
    install,
    kernel_of,
    route_sub_agent_request,
    route_sub_agent_socket,
)

# ---- the agents


class Chat(Agent):
    """One chat: its own file, its own alarms, its own sockets."""

    initial_state: ClassVar[Any] = {"said": 0}

    async def settle_in(self, hub: str, chat_id: str) -> None:
        """Remember where this chat is listed."""
        self.sql("CREATE TABLE IF NOT EXISTS home (hub TEXT, id TEXT UNIQUE)")
        self.sql("INSERT OR IGNORE INTO home VALUES (?, ?)", hub, chat_id)

    @rpc
    async def say(self, text: str) -> int:
        """Take a message, and tell the hub of it; return how many there are."""
        count = self.state["said"] + 1
        self.set_state({"said": count})
        ((hub, chat_id),) = self.sql("SELECT hub, id FROM home")
        listed = await self.kernel.get_agent(Chats, hub)
        await listed.set_metadata(chat_id, {"last": text}, seq=count, peer=self.name)
        return count


class Pad(Agent):
    """A scratch pad of one person: a facet, it lives and dies with their hub."""

    initial_state: ClassVar[Any] = {"text": ""}

    async def on_request(self, request: Request) -> Response:
        """Show the text; take a new one."""
        if request.method == "POST":
            self.set_state({"text": (await request.read()).decode()})
        return Response(self.state["text"])


class Chats(RoutedAgents):
    """What one person has: the hub."""

    agent_class = Chat
    segment = "chats"

    @rpc
    async def open_chat(self, chat_id: str) -> str:
        """Make a chat, or finish making it: the same id twice is one chat."""
        await self.add(chat_id)
        chat = await self.agent(chat_id)
        await chat.settle_in(self.name, chat_id)
        return f"chats/{chat_id}"

    @rpc
    async def close_chat(self, chat_id: str) -> None:
        """Delete a chat with all that was said."""
        await self.delete(chat_id)

    @rpc
    async def find(self, words: str) -> list[str]:
        """Return the chats whose last message has these words; wakes none of them."""
        query = (
            "SELECT id FROM routed_agents"
            " WHERE json_extract(metadata, '$.last') LIKE ? ORDER BY id"
        )
        return [row.id for row in self.sql(query, f"%{words}%")]


# ---- who may come in (your login goes here: see the guide to mounting)


def user_of(headers: Any, query: Any) -> str | None:
    """Return who says so; a real service checks a token."""
    return headers.get("x-user") or query.get("user")


async def authenticate(request: Request) -> str | Response:
    """Return who comes to an agent."""
    return user_of(request.headers, request.query) or Response("who are you?", 401)


async def admit(request: Request, root: PathStep) -> Response | None:
    """Let people in to their own hub, and to chats only through it."""
    if root == ("Chats", request.identity):
        return None
    return Response("not yours", 403)


# ---- the service

app = QuartTrio(__name__)
install(
    app,
    partial(
        open_kernel,
        roots=[Chats, Chat],
        facets=[Pad],
        storage=f"sqlite:{os.environ.get('APP_DATA', './data')}",
    ),
    authenticate=authenticate,
    admit=admit,
)


@app.route("/pads/<user>/<path:rest>", methods=["GET", "POST"])
async def pad(user: str, rest: str) -> Any:
    """Answer for a pad of this person."""
    if user_of(request.headers, request.args) != user:
        abort(403)
    hub = await kernel_of(app).get_agent(Chats, user)
    return await route_sub_agent_request(request, hub, identity=user)


@app.websocket("/pads/<user>/<path:rest>")
async def pad_socket(user: str, rest: str) -> None:
    """Connect to a pad of this person."""
    if user_of(websocket.headers, websocket.args) != user:
        abort(403)
    hub = await kernel_of(app).get_agent(Chats, user)
    await route_sub_agent_socket(websocket, hub, identity=user)
