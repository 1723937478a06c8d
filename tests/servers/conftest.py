"""Real servers and processes, as clients and supervisors see them."""

from configured import configured
from one_thread import one_thread

__all__ = ["configured", "one_thread"]
