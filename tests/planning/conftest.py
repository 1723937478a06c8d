"""What is decided and said before anything loads: plans, refusals, `check`, `doctor`, capacity, constants."""

from configured import bare, configured
from one_thread import one_thread

__all__ = ["bare", "configured", "one_thread"]
