"""Names of tensor dimensions used in annotations throughout the library.

============  ==========================================================
``batch``     independent prompts, patches or readers
``layer``     decoder layer
``pos``       cached token position, or query position where no cache is involved
``head``      query head
``kv_head``   key-value head (stored once, read by ``head // kv_head`` query heads)
``d_model``   residual width
``d_key``     width of one stored key row of one key-value head
``d_value``   width of one stored value row of one key-value head
``answer``    candidate answers whose logits are read
============  ==========================================================
"""

BATCH = "batch"
LAYER = "layer"
POS = "pos"
HEAD = "head"
KV_HEAD = "kv_head"
D_MODEL = "d_model"
D_KEY = "d_key"
D_VALUE = "d_value"
ANSWER = "answer"
