"""Errors of single layers and KV heads, without an engine that answers."""
