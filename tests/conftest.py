"""The same hypothesis examples in every run: a failure in CI is a failure everywhere."""

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
