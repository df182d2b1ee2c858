"""SGLang on a machine without an accelerator: a platform and an attention backend, both through SGLang's registries."""
