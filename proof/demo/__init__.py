"""A small model to try the plugin with, and the `make run` program around it."""
