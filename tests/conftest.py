"""Settings of every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("dspark", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dspark")
