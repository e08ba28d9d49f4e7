"""FlashInfer behind the ops of `fp4kv`: the only package here that imports it, and only when a call is served by it.

`support.py` says what each kernel takes and on which GPU; `paged.py` turns a call into what FlashInfer reads; a file a
kernel hands it over. Nothing here is ever copied from the cache: FlashInfer gets views of its bytes.
"""
