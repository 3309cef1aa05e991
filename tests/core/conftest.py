"""Hypothesis on a busy machine: no deadlines, and no verdict on how slow drawing is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("core")
