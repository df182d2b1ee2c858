"""The page `/dashboard`: what the engine does, live."""
