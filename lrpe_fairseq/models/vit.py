"""``lrpe_vit`` and ``lrpe_cct``: the classifier of :mod:`.classifier` as vision transformers."""

from dataclasses import dataclass

from fairseq.models import register_model

from lrpe_fairseq.models.classifier import LRPEClassifier, LRPEClassifierConfig
from lrpe_fairseq.models.presets import defaults


@defaults(
    encoder_layers=12,
    encoder_embed_dim=384,
    encoder_ffn_embed_dim=1536,
    encoder_attention_heads=6,
    encoder_learned_pos=True,
    input="image",
    patch=16,
    final_norm="after",
    dropout=0.0,
    drop_path=0.1,
    qkv_bias=False,
)
@dataclass
class LRPEViTConfig(LRPEClassifierConfig):
    """DeiT-small as in TMLR LRPE, Table 3: 12 x 384, 6 heads, FFN 1536, patches of 16 x 16.

    The grid is that of ``--image-size``, by default 14 x 14 patches.

    The mean over patches is normalized and classified. fairseq's learned positions have two rows
    more than there are patches.
    """


@register_model("lrpe_vit", dataclass=LRPEViTConfig)
class LRPEViT(LRPEClassifier):
    """Vision transformer: ``--arch lrpe_vit`` or ``_name: lrpe_vit``."""


@defaults(
    encoder_layers=2,
    encoder_embed_dim=64,
    encoder_ffn_embed_dim=128,
    encoder_attention_heads=2,
    patch=8,
    drop_path=0.0,
)
@dataclass
class LRPEViTTinyConfig(LRPEViTConfig):
    """2 x 64, 2 heads, FFN 128, patches of 8 x 8: ``lrpe_vit`` for images of 32 x 32."""


@register_model("lrpe_vit_tiny", dataclass=LRPEViTTinyConfig)
class LRPEViTTiny(LRPEViT):
    """The tiny preset: ``--arch lrpe_vit_tiny`` or ``_name: lrpe_vit_tiny``."""


@defaults(
    encoder_layers=7,
    encoder_embed_dim=256,
    encoder_ffn_embed_dim=512,
    encoder_attention_heads=4,
    input="image",
    patch_embedding="convolution",
    patch=3,
    pooling="gate",
    dropout=0.1,
    attention_dropout=0.1,
    drop_path=0.1,
)
@dataclass
class LRPECCTConfig(LRPEClassifierConfig):
    """The model of ``004_…`` Table 3, column Image: 7 x 256, 4 heads, FFN 512, pre-norm.

    Its tokenizer is a 3 x 3 convolution with ReLU and max-pooling of 3 x 3: 32 x 32 pixels are
    10 x 10 tokens. A learned gate pools them. Sinusoidal absolute positions.
    """


@register_model("lrpe_cct", dataclass=LRPECCTConfig)
class LRPECCT(LRPEClassifier):
    """Compact convolutional transformer: ``--arch lrpe_cct`` or ``_name: lrpe_cct``."""


@defaults(
    encoder_layers=2,
    encoder_embed_dim=64,
    encoder_ffn_embed_dim=128,
    encoder_attention_heads=2,
    drop_path=0.0,
    dropout=0.0,
    attention_dropout=0.0,
)
@dataclass
class LRPECCTTinyConfig(LRPECCTConfig):
    """2 x 64, 2 heads, FFN 128: ``lrpe_cct`` at a size that trains in minutes on a CPU."""


@register_model("lrpe_cct_tiny", dataclass=LRPECCTTinyConfig)
class LRPECCTTiny(LRPECCT):
    """The tiny preset: ``--arch lrpe_cct_tiny`` or ``_name: lrpe_cct_tiny``."""
