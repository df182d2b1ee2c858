"""Runnable examples; each works against a server that is already running, and the README shows them."""
