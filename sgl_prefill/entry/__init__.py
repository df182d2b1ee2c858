"""The command line, the offline engine, and the hooks: declared, applied, verified."""
