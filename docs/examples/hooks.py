"""A shop's orders as agents: webhooks come in, the service itself pushes news to them.

    hypercorn --worker-class trio --workers 0 hooks:app      # any ASGI server
    culet serve hooks:app                                    # or ours

`POST /hooks/payments` is what a payment provider calls, again and again until it gets a
200. `/agents/order/{id}` is an order, for its customer's page. What the courier says at
`POST /courier/{id}` a task of the service's own pushes into the orders.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import partial
from typing import Any, ClassVar

import msgspec
import trio
from quart import Response as Page
from quart import request
from quart_trio import QuartTrio

from culet.kernel import Agent, FiberRecovery, FiberResolution, open_kernel
from culet.web import install, kernel_of

SECRET = os.environ.get("HOOK_SECRET", "change me").encode()
STEP_S = float(os.environ.get("STEP_S", "0"))  # that a step of an order takes
sightings, seen = trio.open_memory_channel[tuple[str, str]](1000)


class Paid(msgspec.Struct):
    """What the provider tells; `delivery` is the same each time it tells it again."""

    delivery: str
    order: str
    cents: int


class Order(Agent):
    """One order: what was paid, what was done about it, where the parcel is."""

    initial_state: ClassVar[Any] = {
        "paid": 0, "steps": [], "parcel": "not sent", "currency": None,
    }  # fmt: skip

    async def on_start(self, props: Any = None) -> None:
        """Note the currency: `props` are what the service gives a root that a client opens."""
        if props and self.state["currency"] is None:
            self.set_state({**self.state, "currency": props["currency"]})

    async def paid(self, cents: int, delivery: str) -> bool:
        """Take one payment; a delivery that is known changes nothing. True: it was new."""
        fiber = await self.fibers.start(
            "paid",
            partial(self._settle, cents),
            key=delivery,
            metadata={"cents": cents},
        )
        await self.durable()  # only then may the provider hear that we have it
        return fiber.accepted

    async def _settle(self, cents: int) -> None:
        for step in ("booked", "packed", "posted")[self._done() :]:
            self._note(step, cents if step == "booked" else 0)
            self.stash(self._done())
            await trio.sleep(STEP_S)

    async def on_fiber_recovered(self, ctx: FiberRecovery) -> FiberResolution:
        """Go on with a payment that the process died over."""
        await self._settle(ctx.metadata["cents"])
        return FiberResolution()

    def _done(self) -> int:
        return len(self.state["steps"])

    def _note(self, step: str, cents: int) -> None:
        known = self.state
        steps = [*known["steps"], step]
        self.set_state({**known, "paid": known["paid"] + cents, "steps": steps})

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
    body = await request.get_data()
    given = request.headers.get("x-signature", "")
    signed = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(given.encode(), signed.encode()):
        return Page("not signed by the provider\n", 403)
    try:
        told = msgspec.json.decode(body, type=Paid)
    except msgspec.DecodeError as error:
        return Page(f"{error}\n", 400)
    order = await kernel_of(app).get_agent(Order, told.order)
    new = await order.paid(told.cents, told.delivery)
    return Page("taken\n" if new else "known\n")


@app.before_serving
async def begin() -> None:
    """Start the service's own task; it ends with the app."""
    app.add_background_task(tell_orders)


async def tell_orders() -> None:
    """Push what the courier says into the orders, one after the other."""
    async for order_id, where in seen:
        order = await kernel_of(app).get_agent(Order, order_id)
        await order.parcel(where)


@app.post("/courier/<order_id>")
async def courier(order_id: str) -> Page:
    """Take where a parcel was seen; 503 when the orders are not told fast enough."""
    where = (await request.get_data()).decode(errors="replace")
    try:
        sightings.send_nowait((order_id, where))
    except trio.WouldBlock:
        return Page("later\n", 503)
    return Page("", 202)
