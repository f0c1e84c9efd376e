"""What `python -m dgmoe_ops` offers. Looks at all of the package; no part looks at it."""
