"""How formats work: pages and requests to scale, and what transform coding does to channels."""
