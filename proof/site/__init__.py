"""The documents as a site, and its pages in a real browser."""
