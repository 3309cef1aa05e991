"""A service of one's own with an assistant for each tenant, mounted under /agents.

    APP_SECRET=change-me hypercorn --worker-class trio mounted:app      # any ASGI server
    APP_SECRET=change-me culet serve mounted:app                        # or ours

People log in at /login and get a signed cookie; programs take the same token as a header
or a query parameter. Nobody opens the assistant of another tenant, and only an admin
talks to a clerk directly.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import AsyncIterator
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import Any

import msgspec
from itsdangerous import BadSignature, URLSafeTimedSerializer
from quart import Response as Page
from quart import request, websocket
from quart_trio import QuartTrio

from culet.adapters import ModelRequest, ScriptedModel, Think
from culet.adapters.model import ToolCall
from culet.kernel import (
    Agent,
    ChildRef,
    Chunk,
    PathStep,
    Request,
    Response,
    Turn,
    agent_tool,
    open_kernel,
    rpc,
)
from culet.web import install

# ---- who people are (yours: a database)


class User(msgspec.Struct, frozen=True):
    """What agents and gates know of a visitor."""

    name: str
    tenant: str
    admin: bool = False


USERS = {
    "alice": (User("alice", "acme", admin=True), "wonderland"),
    "anna": (User("anna", "acme"), "karenina"),
    "bob": (User("bob", "bold"), "builder"),
}
signer = URLSafeTimedSerializer(os.environ["APP_SECRET"], salt="login")
OPERATORS = {"alice"}
COOKIE, DAYS = "who", 14

# ---- the agents


class Task(msgspec.Struct):
    """What a clerk is asked to do."""

    text: str


class Clerk(Agent):
    """Counts words, as a tool of the assistant."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Do one task."""
        words = len(turn.input["text"].split())
        yield {"type": "text-delta", "id": "t", "delta": f"{words} words"}

    @rpc
    async def whoami(self) -> str:
        """Return the clerk's name: for admins, see the gate."""
        return self.name


def script(asked: ModelRequest) -> list[Any]:
    """Stand in for a language model: first ask the clerk, then tell what it said."""
    last = asked.messages[-1]
    if last.role == "tool":
        return [f"The clerk found {last.content}."]
    return [ToolCall(id="count", name="clerk", input={"text": last.content})]


class Assistant(Think):
    """One per tenant; its name is the tenant's."""

    model = ScriptedModel(script)
    system_prompt = "You answer the people of one company."

    def get_tools(self) -> dict[str, Any]:
        """Offer the clerk."""
        return {"clerk": agent_tool(Clerk, description="Counts words", input_type=Task)}

    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        """Gate of the hop to a clerk: admins only, and only to one that exists."""
        if not request.identity.admin:
            return Response("admins only", 403)
        return await super().on_before_sub_agent(request, child)


# ---- who may come in


async def authenticate(request: Request) -> User | Response:
    """Return who a request is from, by cookie or token; refuse strangers."""
    user = user_of(token_in(request))
    return user or Response("log in first", 401)


async def admit(request: Request, root: PathStep) -> Response | None:
    """Let people in to the assistant of their own tenant."""
    if root.name != request.identity.tenant:
        return Response("this is another tenant's", 403)
    return None


async def operators(request: Request) -> bool:
    """Let those look at all agents of all tenants, and stop them, who run the service."""
    return request.identity.name in OPERATORS


def token_in(request: Request) -> str:
    """Return the token of a header, a query parameter (npm clients) or the cookie."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token
    if "token" in request.query:
        return request.query["token"]
    try:
        cookie = SimpleCookie(request.headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def user_of(token: str) -> User | None:
    """Return whose a token is; None when it is forged or too old."""
    try:
        name = signer.loads(token, max_age=DAYS * 86400)
    except BadSignature:
        return None
    known = USERS.get(name)
    return known[0] if known else None


# ---- the service

app = QuartTrio(__name__)
install(
    app,
    partial(
        open_kernel,
        roots=[Assistant],
        facets=[Clerk],
        storage=f"sqlite:{os.environ.get('APP_DATA', './data')}",
    ),
    authenticate=authenticate,
    admit=admit,
    inspect=operators,
)


@app.post("/login")
async def login() -> Page:
    """Take name and password as a form; set the cookie and return the token."""
    form = await request.form
    user, password = USERS.get(form.get("name", ""), (None, ""))
    given = form.get("password", "")
    if user is None or not hmac.compare_digest(given.encode(), password.encode()):
        return Page("wrong name or password\n", 403)
    token = signer.dumps(user.name)
    page = Page(token, content_type="text/plain")
    page.set_cookie(COOKIE, token, max_age=DAYS * 86400, httponly=True, samesite="Lax")
    return page


@app.get("/")
async def index() -> str:
    """Show that the service's own pages are as they were."""
    return "my own page\n"


@app.websocket("/echo")
async def echo() -> None:
    """Show that the service's own WebSockets are as they were."""
    while True:
        await websocket.send(await websocket.receive())
