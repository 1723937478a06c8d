"""A server under mixed load for minutes: no errors, flat memory, every block free at the end (`soak.main`)."""
