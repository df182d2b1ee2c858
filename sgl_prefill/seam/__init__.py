"""Everything that touches SGLang's insides at run time: the hook list, their application, and the proof that they took."""
