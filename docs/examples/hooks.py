"""A shop's orders as agents: webhooks come in, the service itself pushes news to them.

    export HOOK_SECRET=change-me
    hypercorn --worker-class trio --workers 0 --bind 127.0.0.1:8000 hooks:app  # any ASGI server
    culet serve --port 8000 hooks:app                                          # or ours

`POST /hooks/payments` is what a payment provider calls, again and again until it gets a
200. `/agents/order/{id}` is an order, for its customer's page. What a courier says at
`POST /hooks/courier` a task of the service's own pushes into the orders. Both sign what
they send. (Who may look at an order: see `authenticate` and `admit` in mounted.py.)
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from functools import partial
from typing import Any, ClassVar

import msgspec
import trio
from quart import Response as Page
from quart import request
from quart_trio import QuartTrio

from culet.kernel import Agent, FiberRecovery, FiberResolution, open_kernel
from culet.kernel.errors import CuletError
from culet.web import install, kernel_of

SECRET = os.environ["HOOK_SECRET"].encode()
STEP_S = float(os.environ.get("STEP_S", "0"))  # that a step of a payment takes
STEPS = ("booked", "thanked", "told to the warehouse")
log = logging.getLogger("shop")


class Paid(msgspec.Struct):
    """What the provider tells; `delivery` is the same each time it tells it again."""

    delivery: str
    order: str
    cents: int


class Seen(msgspec.Struct):
    """What the courier tells."""

    order: str
    where: str


class Order(Agent):
    """One order: what was paid, what was done about each payment, where the parcel is."""

    initial_state: ClassVar[Any] = {
        "paid": 0, "payments": {}, "parcel": "not sent", "currency": None,
    }  # fmt: skip

    async def on_start(self, props: Any = None) -> None:
        """Note the currency: `props` are what the service gives a root that a client opens."""
        if props and self.state["currency"] is None:
            self.set_state({**self.state, "currency": props["currency"]})

    async def paid(self, cents: int, delivery: str) -> bool:
        """Take one payment; a delivery that is known changes nothing. True: it was new."""
        fiber = await self.fibers.start(
            "paid",
            partial(self._settle, delivery, cents),
            key=delivery,
            metadata={"cents": cents},
        )
        await self.durable()  # only then may the provider hear that we have it
        return fiber.accepted

    async def _settle(self, delivery: str, cents: int, done: int = 0) -> None:
        for step in STEPS[done:]:
            self._note(delivery, step, cents if step == "booked" else 0)
            done += 1
            self.stash(
                done
            )  # nothing is awaited between the two: both are kept, or none
            await trio.sleep(STEP_S)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        """Go on with a payment that the process died over, behind what was done of it."""
        assert ctx.key is not None
        await self._settle(ctx.key, ctx.metadata["cents"], ctx.snapshot or 0)
        return FiberResolution()

    def _note(self, delivery: str, step: str, cents: int) -> None:
        known = self.state
        steps = [*known["payments"].get(delivery, []), step]
        payments = {**known["payments"], delivery: steps}
        self.set_state({**known, "paid": known["paid"] + cents, "payments": payments})

    async def parcel(self, where: str) -> None:
        """Tell everybody who looks at this order where its parcel is."""
        if self.state["parcel"] != where:
            self.set_state({**self.state, "parcel": where})


app = QuartTrio(__name__)
install(
    app,
    partial(
        open_kernel,
        roots=[Order],
        storage=f"sqlite:{os.environ.get('APP_DATA', './data')}",
    ),
    props={"currency": "EUR"},
)


@app.post("/hooks/payments")
async def payments() -> Page:
    """Take what the provider tells; answer 200 only when it is on disk."""
    told = await signed(Paid)
    if isinstance(told, Page):
        return told
    try:
        order = await kernel_of(app).get_agent(Order, told.order)
        new = await order.paid(told.cents, told.delivery)
    except CuletError as error:
        log.warning("a payment for %r was not taken: %s", told.order, error)
        return Page("not taken\n", 503)  # the provider will tell it again
    return Page("taken\n" if new else "known\n")


async def signed(kind: type[Any]) -> Any:
    """Return what the request says, a `kind`; or the page that refuses it."""
    body = await request.get_data()
    given = request.headers.get("x-signature", "")
    right = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(given.encode(), right.encode()):
        return Page("not signed by who may say this\n", 403)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        return Page(f"{error}\n", 400)


# ---- news from the service itself

sightings, seen = trio.open_memory_channel[Seen](1000)


@app.before_serving
async def begin() -> None:
    """Start the service's own task; it ends with the app."""
    app.add_background_task(tell_orders)


async def tell_orders() -> None:
    """Push what the courier says into the orders, one after the other."""
    async for told in seen:
        try:
            order = await kernel_of(app).get_agent(Order, told.order)
            await order.parcel(told.where)
        except CuletError as error:  # of this order: the next one is still to be told
            log.warning("order %r was not told: %s", told.order, error)


@app.post("/hooks/courier")
async def courier() -> Page:
    """Take where a parcel was seen; 503 when the orders are not told fast enough.

    It is kept in memory only: who must not lose it does as with payments.
    """
    told = await signed(Seen)
    if isinstance(told, Page):
        return told
    try:
        sightings.send_nowait(told)
    except trio.WouldBlock:
        return Page("later\n", 503)
    return Page("heard\n", 202)
