"""The same hypothesis examples in every run: a failure in CI is a failure everywhere."""

import os

# Several test processes share the cores: a thread that waits for another must not keep one busy. Read by OpenMP when
# it is loaded, that is with torch, which nothing has imported yet.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvq",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvq")
