"""Several engines behind SGLang's gateway (`smg`), each user's requests at one of them (PrefillOnly, section 7.1)."""
