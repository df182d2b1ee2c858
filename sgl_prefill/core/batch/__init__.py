"""Plans over a whole job whose requests are all known ahead (BatchLLM, section 4)."""
