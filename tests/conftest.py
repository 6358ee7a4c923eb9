"""Settings shared by all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# kernels compile inside examples, so no deadline; CI repeats the same examples
settings.register_profile("flexpress", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile("flexpress")
