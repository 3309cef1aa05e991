"""Spans of a kernel as OpenTelemetry's: `open_kernel(tracer=OtelTracer())`.

Needs the extra `otel`. The spans go where the process' tracer provider sends them; that is
the service's to set up. No span holds what somebody said: attributes are ids, classes,
attempts and paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from culet.kernel.tracing import HERE, Kind

_FORMAT: Final = TraceContextTextMapPropagator()
_KINDS: Final = {
    "request": SpanKind.SERVER,
    "rpc": SpanKind.SERVER,
    "turn": SpanKind.CONSUMER,
    "call": SpanKind.CONSUMER,
    "model": SpanKind.CLIENT,
}


@final
class OtelTracer:
    """Keeps a kernel's spans with OpenTelemetry."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("culet", tracer_provider=provider)

    @contextmanager
    def span(
        self,
        kind: Kind,
        name: str,
        about: Mapping[str, Any],
        *,
        parent: str | None = HERE,
        current: bool = True,
    ) -> Iterator[None]:
        """Return a span around a block. See `Tracer.span`."""
        span = self._tracer.start_span(
            f"{kind} {name}",
            context=_context(parent),
            kind=_KINDS.get(kind, SpanKind.INTERNAL),
            attributes={f"culet.{key}": value for key, value in about.items()},
        )
        try:
            if current:
                with trace.use_span(
                    span, record_exception=False, set_status_on_exception=False
                ):
                    yield
            else:
                yield
        except Exception as error:  # its class only: the text may be somebody's secret
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()

    def context(self) -> str | None:
        """Return the `traceparent` of the current span; None without one."""
        carrier: dict[str, Any] = {}
        _FORMAT.inject(carrier)
        return carrier.get("traceparent")

    def note(self, about: Mapping[str, Any]) -> None:
        """Add to the current span. See `Tracer.note`."""
        told = {f"culet.{key}": value for key, value in about.items()}
        trace.get_current_span().set_attributes(told)


def _context(parent: str | None) -> Context | None:
    """Return what a span begins under; None is what is current."""
    if parent == HERE:
        return None
    if parent is None:
        return Context()
    return _FORMAT.extract({"traceparent": parent}, context=Context())
