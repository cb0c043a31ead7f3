"""What fairseq's own layers have: options and names, as plain data for all packages.

This module imports nothing.
"""

STOCK = {
    "attention_type": "softmax",
    "position_encoding": "none",
    "attention_window": "0",
    "attention_parts": "none",
    "kv_heads": "0",
    "head_dim": "0",
    "out_bias": "True",
    "score_scale": "0.0",
}
"""The options of cross-attention that is fairseq's own."""
NORMFORMER = {
    "scale_attn": "attn_ln",
    "scale_fc": "ffn_layernorm",
    "scale_heads": "c_attn",
    "scale_resids": "w_resid",
}
"""Option of NormFormer -> the part of a layer, as its weights are named."""
